"""Suggest settings for a run that waits for data, from a description of its input pipeline; without torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from imagenet_fast.recipe.data_config import ImageData

_TOLD = 3
_LARGER = 1.25  # times what is needed; below that, shrinking images beforehand gains little
_SHRUNK = 256
_NVIDIA_PREFETCH, _NVIDIA_HARDWARE = 5, 0.99  # NVIDIA's for MLPerf on DGX-H100, as in our recipes for eight GPUs


@dataclass(frozen=True)
class InputPipeline:
    """A description of a rank's input pipeline."""

    data: ImageData
    gpu: bool
    """True if the rank trains on a GPU."""
    cores: int
    """Number of CPU cores that the rank may use."""
    dali: bool
    """Whether DALI is installed."""
    short_side: float | None
    """Mean shorter side of some training images, in pixels; None if `data prepare` cannot shrink them."""
    root: Path
    """Data directory."""


@dataclass(frozen=True)
class Suggestion:
    """A setting or command to try, as it is written, and its effect."""

    written: str
    does: str


def advice(wait_pct: float, supply: InputPipeline) -> list[str]:
    """Return the lines to print after a run that waited ``wait_pct`` per cent of its training for data."""
    found = list(islice(suggestions(supply), _TOLD))
    said = f"Waited for data {wait_pct:.0f} % of training: a rank reads with {supply.data.loader}, {_threads(supply)}"
    if not found:
        return [f"{said}. Nothing is left to set; give ranks more cores, or fewer images a second to train on."]
    return [f"{said}. Most likely to help, the likeliest first:", *(f"  {r.written}  ({r.does})" for r in found)]


def suggestions(supply: InputPipeline) -> Iterator[Suggestion]:
    """Yield all that may help this run, the likeliest first.

    No suggestion changes what is learned, except those that shrink images beforehand.
    """
    data, cores = supply.data, supply.cores
    decodes_on_gpu = supply.gpu and data.loader == "dali"
    if data.workers and data.workers < cores:
        yield Suggestion("--set data.workers=0", f"decodes in all {cores} cores of a rank")
    if data.loader == "dali" and not supply.gpu:
        yield Suggestion("--set data.loader=folder", "takes less of a processor, where there is no GPU to decode on")
    if data.loader == "folder" and supply.gpu and supply.dali:
        yield Suggestion("--set data.loader=dali", "decodes on the GPU")
    side = max(_SHRUNK, data.resize)
    if decodes_on_gpu:
        yield from _shrink(supply, side)
        yield from _tune_dali(data)
    if not decodes_on_gpu:
        yield from _shrink(supply, side)
    if data.prefetch < _NVIDIA_PREFETCH:
        yield Suggestion(
            f"--set data.prefetch={_NVIDIA_PREFETCH}", "reads further ahead, where a disk or network stutters"
        )


def _threads(supply: InputPipeline) -> str:
    threads = min(supply.data.workers or supply.cores, supply.cores)
    return f"in {threads} of {supply.cores} cores" if supply.cores > 1 else "on one core"


def _tune_dali(data: ImageData) -> Iterator[Suggestion]:
    if data.dali.hw_decoder_load < _NVIDIA_HARDWARE:
        setting = f"--set data.dali.hw_decoder_load={_NVIDIA_HARDWARE}"
        yield Suggestion(setting, "for GPUs with a JPEG decoder of their own, such as A100 and H100")


def _shrink(supply: InputPipeline, side: int) -> Iterator[Suggestion]:
    """Suggest to shrink the images once, with `data prepare`."""
    if supply.short_side is not None and supply.short_side > _LARGER * side:
        root = supply.root.absolute()
        smaller = root.with_name(f"{root.name}-{side}")
        command = f"imagenet-fast data prepare --source {shlex.quote(str(root))} --out {shlex.quote(str(smaller))}"
        about = f"shorter sides are {supply.short_side:.0f} pixels on average; then train with --data on those"
        yield Suggestion(f"{command} --resize {side} --subset", about)
