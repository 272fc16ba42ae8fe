"""Judge a run of ResNet-50 by MLCommons' reference convergence points: epochs to 75.9 % top-1 by batch size.

MLPerf's checker accepts a submission by the same points. They are LARS runs with MLPerf's crops and schedule; all
that is known of them is in ``reference_points.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.report import PastRun
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.job import Job, recipe_tables

_TABLE = json.loads(Path(__file__).with_name("reference_points.json").read_text(encoding="utf-8"))
_TARGET: float = _TABLE["target_top1"]
_RUNS: dict[int, list[int]] = {entry["batch"]: entry["epochs"] for entry in _TABLE["points"]}
"""Epochs of each of the reference's runs, by batch size, smallest first."""

SOURCE = f"Reference: MLCommons' convergence points for {_TARGET:g} % ({_TABLE['source']})."


@dataclass(frozen=True)
class ReferencePoint:
    """Epochs that the reference needs at one batch size."""

    batch: int
    mean: float
    fewest: float
    most: float
    interpolated: bool


def reference_at(batch: int) -> ReferencePoint | None:
    """Return the point of ``batch``, interpolated linearly if there is none; None outside the range of the points."""
    if not min(_RUNS) <= batch <= max(_RUNS):
        return None
    known = [(fmean(epochs), min(epochs), max(epochs)) for epochs in _RUNS.values()]
    mean, fewest, most = (float(np.interp(batch, [*_RUNS], column)) for column in zip(*known, strict=True))
    return ReferencePoint(batch, mean, fewest, most, batch not in _RUNS)


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
    images, batch = run.begun.get("train_images"), run.begun.get("global_batch")
    if (why := _misfit(job, images, batch)) is not None:
        return f"not compared: {why}"
    assert isinstance(images, int)
    assert isinstance(batch, int)
    point = reference_at(batch)
    if point is None:
        return f"not compared: its batch is {batch}, and there are points from {min(_RUNS)} to {max(_RUNS)} alone"
    evaluations = [
        (e["epoch"], e["top1"])
        for e in run.events
        if e["event"] == "eval" and isinstance(e.get("epoch"), int) and isinstance(e.get("top1"), int | float)
    ]
    means = _other_means(job)
    others = f"; the reference has other means than {', '.join(means)}" if means else ""
    return _verdict(point, evaluations, images // batch * batch / images, run.status) + others


def _misfit(job: Job, images: Any, batch: Any) -> str | None:
    """Return why the run is none of ResNet-50 on ImageNet as MLPerf evaluates it; None if it is."""
    recipe, (fewest, most) = job.recipe, _TABLE["images"]
    model, size = recipe.model.label, recipe.data.evaluated_size
    if model != _TABLE["model"]:
        return f"its model is {model}, and the points are for {_TABLE['model']}"
    if not isinstance(images, int) or not fewest <= images <= most:  # some may be left out
        return f"it was trained on {images or 'an unknown number of'} images, and the points are for ImageNet's {most}"
    if size != _TABLE["image_size"]:
        return f"it was evaluated at {size} pixels, and the points are for {_TABLE['image_size']}"
    if not isinstance(batch, int):
        return "its events do not tell its batch"
    return f"it starts from the weights {job.init_from}, and the reference from fresh ones" if job.init_from else None


def _verdict(point: ReferencePoint, evaluations: list[tuple[int, float]], passes: float, status: str) -> str:
    """Compare with a point; ``passes`` is how much of all images an epoch of the run trains on."""
    field = (
        f"the reference needs {point.mean:.1f} epochs at a batch of {point.batch} "
        f"({point.fewest:.4g} to {point.most:.4g} in its runs{', interpolated' * point.interpolated})"
    )
    if passes < 0.995:
        field += f"; an epoch of the run has {100 * passes:.1f} % of the images"
    last = max((epoch for epoch, _ in evaluations), default=0)
    reached = next((epoch for epoch, top1 in evaluations if top1 >= _TARGET), None)
    if reached is None and round(last * passes) > point.most:
        return f"slower than the field: not at {_TARGET:g} % after {last} epochs, and {field}"
    if reached is None:
        ended = f"it is '{status}'" if status not in ("finished", "reached") else "it ended"
        return f"not compared: {ended} after epoch {last} without {_TARGET:g} %, and {field}"
    before = max((epoch for epoch, _ in evaluations if epoch < reached), default=0)
    said = f"{_TARGET:g} % in epoch {reached}" + (f" (or since {before + 1})" if reached > before + 1 else "")
    if round(before * passes) >= point.most:
        return f"slower than the field: {said}, and {field}"
    if round(reached * passes) < point.fewest:
        return f"better than the field: {said}, and {field}"
    return f"normal: {said}, and {field}"


def _other_means(job: Job) -> list[str]:
    """Return the keys of the recipe by which the run is trained otherwise than the reference."""
    tables = recipe_tables(job.recipe)
    others = []
    for key, known in _TABLE["means"].items():
        table, _, name = key.rpartition(".")
        own = (tables[table] if table else tables).get(name, known)
        if own != known:
            others.append(f"{key} '{own}'" if isinstance(own, str) else key)
    if (engine := job.recipe.sync.kind) in ("sparse", "powersgd"):
        others.append(f"sync.kind '{engine}'")
    return others
