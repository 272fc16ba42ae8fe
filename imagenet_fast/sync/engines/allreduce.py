"""The naive system: one all-reduce a layer, after backward, each waited for before the next begins."""

from __future__ import annotations

import math

import torch

from imagenet_fast.recipe.sync_config import AllReduceSync
from imagenet_fast.sync.engine import Engine


def allreduce(settings: AllReduceSync, wire: torch.dtype) -> Engine:
    """No fusion and no overlap: the floor that the other engines are measured from."""
    return Engine(
        wire, "each", fuse=math.inf, together=lambda span: span.layer, collective=settings.collective,
        servers=settings.servers,
    )  # fmt: skip
