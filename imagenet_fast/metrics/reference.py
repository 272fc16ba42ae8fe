"""Judge a run of ResNet-50 by MLCommons' reference convergence points: epochs to 75.9 % top-1 by batch size.

MLPerf's checker accepts a submission by the same points. They are LARS runs with MLPerf's crops and schedule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.report import PastRun
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.load import load_recipe
from imagenet_fast.recipe.network import ExternalModel
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import PowerSgdSync, SparseSync

_TABLE = json.loads(Path(__file__).with_name("reference_points.json").read_text(encoding="utf-8"))
_TARGET: float = _TABLE["target_top1"]
_IMAGES = range(1_268_000, 1_281_168)  # ImageNet's, of which some may be left out
_SIZE = 224

SOURCE = f"Reference: MLCommons' convergence points for {_TARGET:g} % ({_TABLE['source']})."


@dataclass(frozen=True)
class ReferencePoint:
    """Epochs that the reference needs at one batch size."""

    batch: float
    mean: float
    fewest: float
    most: float
    between: tuple[int, int] | None = None
    """Batch sizes between which the numbers are interpolated; None: they are of runs at this batch."""


def reference_points() -> list[ReferencePoint]:
    """Return the points by batch size, smallest first."""
    return [_point(entry["batch"], entry["epochs"]) for entry in _TABLE["points"]]


def _point(batch: int, epochs: list[int]) -> ReferencePoint:
    return ReferencePoint(batch, fmean(epochs), min(epochs), max(epochs))


def reference_at(batch: int) -> ReferencePoint | None:
    """Return the point of ``batch``, interpolated linearly if there is none; None outside the range of the points."""
    points = reference_points()
    if (exact := next((point for point in points if point.batch == batch), None)) is not None:
        return exact
    for below, above in pairwise(points):
        if below.batch < batch < above.batch:
            share = (batch - below.batch) / (above.batch - below.batch)
            mean, fewest, most = (
                getattr(below, name) + share * (getattr(above, name) - getattr(below, name))
                for name in ("mean", "fewest", "most")
            )
            return ReferencePoint(batch, mean, fewest, most, (int(below.batch), int(above.batch)))
    return None


def judge_by_reference(run: PastRun) -> str:
    """Return one sentence: whether the run needed as many epochs as the reference, or why it cannot be compared.

    A run is evaluated after some epochs only, so it reached the target at its evaluation or at any time since the one
    before. It is slower, or better, if all of that time is outside the range of the reference's runs. The reference
    counts passes over all images; our epochs of whole batches are a little shorter (3 % at a batch of 65 536).
    """
    begun: dict[str, Any] = next((e for e in run.events if e["event"] == "run"), {})
    try:
        recipe = load_recipe(RunDir(run.folder).recipe)
    except UserError:
        return "not compared: its recipe.toml is missing or damaged"
    if (why := _misfit(recipe, begun) or _start(run.folder)) is not None:
        return f"not compared: {why}"
    batch = begun["global_batch"]
    point = reference_at(batch)
    if point is None:
        smallest, *_, largest = reference_points()
        known = f"{smallest.batch:g} to {largest.batch:g}"
        return f"not compared: its batch is {batch}, and there are points from {known} alone"
    evaluations = [
        (e["epoch"], e["top1"])
        for e in run.events
        if e["event"] == "eval" and isinstance(e.get("epoch"), int) and isinstance(e.get("top1"), int | float)
    ]
    return _verdict(point, evaluations, _passes(begun["train_images"], batch), run.status) + _means(recipe)


def _passes(images: int, batch: int) -> float:
    """Return how much of all images an epoch of whole batches trains on."""
    return images // batch * batch / images


def _misfit(recipe: Recipe, begun: dict[str, Any]) -> str | None:
    """Return why the run is none of ResNet-50 on ImageNet as MLPerf evaluates it; None if it is."""
    if recipe.model.label != "resnet50":
        return f"its model is {recipe.model.label}, and the points are for resnet50"
    images = begun.get("train_images")
    if images not in _IMAGES:
        return f"it was trained on {images or 'an unknown number of'} images, and the points are for ImageNet's 1281167"
    if recipe.data.evaluated_size != _SIZE:
        return f"it was evaluated at {recipe.data.evaluated_size} pixels, and the points are for {_SIZE}"
    if not isinstance(begun.get("global_batch"), int):
        return "its events do not tell its batch"
    return None


def _start(folder: Path) -> str | None:
    """Return that the run starts from weights; None if it does not, or nothing is known."""
    try:
        given = json.loads(RunDir(folder).job.read_text(encoding="utf-8")).get("init_from")
    except (OSError, ValueError, AttributeError):
        return None
    return f"it starts from the weights {given}, and the reference from fresh ones" if given else None


def _verdict(point: ReferencePoint, evaluations: list[tuple[int, float]], passes: float, status: str) -> str:
    """Compare with a point; ``passes`` is how much of all images an epoch of the run trains on."""
    where = (
        f"between those at {point.between[0]} and {point.between[1]}" if point.between is not None else "at this batch"
    )
    field = (
        f"the reference needs {point.mean:.1f} epochs at a batch of {point.batch:g} "
        f"({point.fewest:.4g} to {point.most:.4g} in its runs {where})"
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


def _means(recipe: Recipe) -> str:
    """Return what to bear in mind if the run is trained by other means than the reference; else an empty string."""
    model = recipe.model
    means = {
        f"optim.kind '{recipe.optim.kind}'": recipe.optim.kind != "lars",
        f"model.blurpool '{model.blurpool}'": model.blurpool != "off",
        "ema_decay": recipe.ema_decay > 0,
        f"loss '{recipe.loss}'": recipe.loss != "cross_entropy",
        "data.sizes": len(recipe.data.sizes) > 0,
        "data.mixup": isinstance(recipe.data, ImageData) and recipe.data.mixup > 0,
        "data.cutmix": isinstance(recipe.data, ImageData) and recipe.data.cutmix > 0,
        f"sync.kind '{recipe.sync.kind}'": isinstance(recipe.sync, SparseSync | PowerSgdSync),
        "model.init": len(model.init) > 0,
        "model.options": isinstance(model, ExternalModel) and len(model.options) > 0,
    }
    others = [name for name, differs in means.items() if differs]
    return f"; the reference has other means than {', '.join(others)}" if others else ""
