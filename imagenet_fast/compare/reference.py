"""Judge a run of ResNet-50 by MLCommons' reference convergence points: epochs to 75.9 % top-1 by batch size.

MLPerf's checker of version 4.0 accepts a submission by the same points. They are LARS runs with MLPerf's crops and
schedule, of which `plan fastest` chooses, too.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.past_run import PastRun
from imagenet_fast.plan.fastest import published_trainings
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.run_dir import RunDir

_MODEL: Final = "resnet50"
_TARGET, _PIXELS = 75.9, 224
_IMAGES = (1_268_000, 1_281_167)  # of ImageNet; some may be left out

SOURCE = (
    f"Reference: MLCommons' convergence points for {_TARGET:g} % "
    "(mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json)."
)


@cache
def _points() -> dict[int, tuple[float, float, float]]:
    """Return the mean, the fewest and the most epochs of the reference's runs by batch size, smallest first."""
    known = published_trainings(_MODEL)
    return {one.recipe.global_batch: one.epochs for one in known if "version 4.0" in one.source}


def reference_at(batch: int) -> tuple[float, float, float]:
    """Return the mean, the fewest and the most epochs at ``batch``, interpolated linearly between points."""
    columns = zip(*_points().values(), strict=True)
    mean, fewest, most = (float(np.interp(batch, [*_points()], column)) for column in columns)
    return mean, fewest, most


def judge_by_reference(run: PastRun) -> str:
    """Return one sentence: whether the run needed as many epochs as the reference, or why it cannot be compared.

    A run is evaluated after some epochs only, so it reached the target at its evaluation or at any time since the one
    before. It is slower, or better, if all of that time is outside the range of the reference's runs. The reference
    counts passes over all images; our epochs of whole batches are a little shorter (3 % at a batch of 65 536).
    """
    try:
        job = RunDir(run.folder).read_job()
    except UserError:
        return "not compared: its job.json is missing or damaged"
    images, batch = (run.last(key, "run") or 0 for key in ("train_images", "global_batch"))  # 0: damaged
    if (misfit := _misfit(job, images, batch)) is not None:
        return f"not compared: {misfit}"
    evaluations = [
        (e["epoch"], e["top1"])
        for e in run.events
        if e["event"] == "eval" and isinstance(e.get("epoch"), int) and isinstance(e.get("top1"), int | float)
    ]
    return _verdict(batch, evaluations, images // batch * batch / images, run.status)


def _misfit(job: Job, images: int, batch: int) -> str | None:
    """Return why the run is none of ResNet-50 on ImageNet as MLPerf evaluates it; None if it is."""
    (fewest, most), first, last = _IMAGES, min(_points()), max(_points())
    model, size = job.recipe.model.label, job.recipe.data.evaluated_size
    conditions = {
        f"its model is {model}, and the points are for {_MODEL}": model == _MODEL,
        f"it was trained on {images} images, and the points are for ImageNet's {most}": fewest <= images <= most,
        f"it was evaluated at {size} pixels, and the points are for {_PIXELS}": size == _PIXELS,
        f"it starts from the weights {job.init_from}, and the reference from fresh ones": job.init_from is None,
        f"its batch is {batch}, and there are points from {first} to {last} alone": first <= batch <= last,
    }
    return next((misfit for misfit, holds in conditions.items() if not holds), None)


def _verdict(batch: int, evaluations: list[tuple[int, float]], passes: float, status: str) -> str:
    """Compare epochs and accuracies; ``passes`` is how much of all images an epoch of the run trains on."""
    mean, fewest, most = reference_at(batch)
    field = (
        f"the reference needs {mean:.1f} epochs at a batch of {batch} "
        f"({fewest:.4g} to {most:.4g} in its runs{', interpolated' * (batch not in _points())})"
    )
    if passes < 0.995:
        field += f"; an epoch of the run has {100 * passes:.1f} % of the images"
    reached = next((epoch for epoch, top1 in evaluations if top1 >= _TARGET), None)
    before = max((epoch for epoch, _ in evaluations if reached is None or epoch < reached), default=0)
    said = f"not at {_TARGET:g} % after {before} epochs"
    if reached is not None:
        said = f"{_TARGET:g} % in epoch {reached}" + (f" (or since {before + 1})" if reached > before + 1 else "")
    if round(before * passes) >= most:
        verdict = "slower than the field"
    elif reached is None:
        verdict = f"not compared ({status})"
    else:
        verdict = "better than the field" if round(reached * passes) < fewest else "normal"
    return f"{verdict}: {said}, and {field}"
