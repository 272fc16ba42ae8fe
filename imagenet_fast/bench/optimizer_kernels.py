"""Count the kernels of an optimizer's step.

Each kernel costs host time, however few numbers it touches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.models import build_model
from imagenet_fast.recipe.optim_config import Lars, Optim, Sgd
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.optimizers import build_optimizer

Event = dict[str, Any]

OPTIMIZERS: dict[str, Optim] = {
    "sgd": Sgd(kind="sgd", lr=0.1, weight_decay=5e-5),
    "lars": Lars(kind="lars", lr=1.0, weight_decay=5e-5),
    "lars, clip": Lars(kind="lars", lr=1.0, weight_decay=5e-5, clip=True),
}


@dataclass(frozen=True)
class StepKernels:
    """Kernels, copies and device time of one optimizer step.

    Figures of the GPU are None if there is no GPU.
    """

    optimizer: str
    """The optimizer."""
    tensors: int
    """Number of parameters."""
    operators: int
    """Number of torch operators that the step calls directly; nested operators are not counted."""
    kernels: int | None
    """Kernels that one step launches; None without a GPU."""
    copies: int | None
    """Number of copies between host and device or within the device, and of memsets."""
    device_s: float | None
    """Total time of all kernels and copies in seconds."""


def count_kernels(recipe: Recipe, classes: int = 1000) -> list[StepKernels]:
    """Count one step of each of ``OPTIMIZERS`` over the parameters of the recipe's model.

    The step is the third, in fp32.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto logs its own start and end
    device, _ = prepare_device(0)
    model = build_model(recipe.model, classes).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return [_count(name, settings, model, device) for name, settings in OPTIMIZERS.items()]


def _count(name: str, settings: Optim, model: nn.Module, device: torch.device) -> StepKernels:
    """Count the third step of one optimizer."""
    optimizer = build_optimizer(settings, model)
    for _ in range(2):
        _give_gradients(optimizer.params)
        optimizer.step()
    _give_gradients(optimizer.params)
    events = _profile(optimizer.step, device)
    operators = _outermost([event for event in events if event.get("cat") == "cpu_op"])
    if device.type != "cuda":
        return StepKernels(name, len(optimizer.params), operators, None, None, None)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    device_s = sum(event["dur"] for event in kernels + copies) / 1e6
    return StepKernels(name, len(optimizer.params), operators, len(kernels), len(copies), device_s)


def _give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def _profile(step: Callable[[], None], device: torch.device) -> list[Event]:
    """Profile ``step`` and return its events in Chrome's trace format, with times in microseconds.

    That format distinguishes kernels from copies.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as watched:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _outermost(events: list[Event]) -> int:
    """Count the events that are not nested in another; all must be of one thread."""
    count, end = 0, 0.0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end:
            count += 1
            end = event["ts"] + event["dur"]
    return count
