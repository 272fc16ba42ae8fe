"""Try the loaders on a node for a few seconds each."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

from imagenet_fast.data import dali
from imagenet_fast.data.source import open_training
from imagenet_fast.data.throughput import OwnLoader, made_photos, measure, training_batches
from imagenet_fast.distributed.cores import cores_per_rank
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.doctor.report import CheckResult
from imagenet_fast.errors import UserError

_SIZE, _BATCH = 224, 64


def try_loaders(data: Path | None, ranks: int, seconds: float = 1.0) -> list[CheckResult]:
    """Measure how fast each loader is for one of this node's ``ranks``.

    On a GPU the result is images per second. Elsewhere it is images per second of processor time, which loaders share
    with training and which other programs do not change.

    Args:
        data: The data directory; None for sample images made for this check.
        ranks: Number of ranks on this node.
        seconds: How long to measure each loader.

    Returns:
        One result, or none if ``data`` cannot be read at all.
    """
    threads = cores_per_rank(ranks)
    device, _ = prepare_device(0)
    loaders: list[OwnLoader] = ["folder", "dali"] if dali.is_installed() else ["folder"]
    with nullcontext((data,)) if data is not None else made_photos(2 * _BATCH) as (folder, *_):
        try:
            images = open_training(folder)
        except (UserError, OSError):  # reported already
            return []
        batch = min(_BATCH, len(images))
        turns: dict[str, list[float]] = {loader: [] for loader in loaders}
        try:
            for loader in (*loaders, *reversed(loaders)):  # whoever comes first finds a cold disk
                batches = training_batches(loader, images, _SIZE, batch, threads, device)
                by_clock, by_core = measure(batches, batch, seconds / 2, device)
                turns[loader].append(by_clock if device.type == "cuda" else by_core)
                del batches  # its threads end now
        except (UserError, RuntimeError) as error:  # a bad image, or a driver that DALI cannot use
            return [CheckResult("loaders", "warn", f"`train` would end with: {error}")]
    told = " and ".join(f"{loader} {fmean(rates):.0f}" for loader, rates in turns.items())
    per = f"second, in {threads} of its threads" if device.type == "cuda" else "second of a core"
    return [CheckResult("loaders", "ok", f"{told} images a {per}, to {_SIZE} pixels")]
