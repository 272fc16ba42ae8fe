"""The naive engine: one all-reduce per layer after backward, each waited for before the next is launched."""

from __future__ import annotations

import math

import torch

from imagenet_fast.recipe.sync_config import AllReduceSync
from imagenet_fast.sync.engine import Engine


def allreduce(settings: AllReduceSync, wire: torch.dtype) -> Engine:
    """Declare the engine without fusion and overlap, the baseline that the other engines are measured against."""
    return Engine(
        wire, "each", fuse=math.inf, together=lambda span: span.layer, collective=settings.collective,
        servers=settings.servers,
    )  # fmt: skip
