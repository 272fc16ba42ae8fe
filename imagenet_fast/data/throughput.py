"""How fast a loader gives training batches, with nothing that trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import psutil
import torch
from torch import Tensor

from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.loaders import open_loader
from imagenet_fast.data.sampler import TrainSampler
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData

OwnLoader = Literal["folder", "dali"]
"""Of images on a disk."""

_WARM_BATCHES = 6
"""More than any of them has ready before it is asked."""


def training_batches(
    loader: OwnLoader, images: ImageSource, image_size: int, batch: int, threads: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """As one rank alone gets them, in bytes; there must be as many ``images`` as make up a batch."""
    data = ImageData(
        dataset="imagenet", loader=loader, image_size=image_size, resize=image_size * 8 // 7, workers=threads
    )
    order = TrainSampler(len(images), Batching(1, batch, 1), 0, seed=1)
    return iter(open_loader(data, images, order, threads, device, seed=1))


def measure(batches: Iterator[Any], batch: int, seconds: float, device: torch.device) -> tuple[float, float]:
    """Images a second, and a second of processor time, of about so many seconds after the first batches."""
    for _ in range(_WARM_BATCHES):
        next(batches)
    _settle(device)
    taken, spent, begun = 0, _processor_s(), time.perf_counter()
    while not taken or time.perf_counter() - begun < seconds:
        next(batches)
        _settle(device)
        taken += batch
    return taken / (time.perf_counter() - begun), taken / (_processor_s() - spent)


def fastest(rates: Mapping[str, float | None]) -> str:
    """Which of our own loaders to take, by images a second; None: it is not installed. Nothing where there is no
    choice among ``rates``, which may have others too."""
    own = {loader: rates[loader] for loader in get_args(OwnLoader) if loader in rates}
    ordered = sorted(((rate, loader) for loader, rate in own.items() if rate), reverse=True)
    if len(own) < 2 or not ordered:
        return ""
    (most, first), *others = ordered
    said = [f"fastest here: {first}", *(f"{most / rate:.2f} x {loader}" for rate, loader in others)]
    return ", ".join([*said, *(f"{loader} is not installed" for loader, rate in own.items() if not rate)])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor_s() -> float:
    """That this process and those it has started have taken so far."""
    others = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in others)
