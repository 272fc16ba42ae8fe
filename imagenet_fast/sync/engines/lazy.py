"""Lazy all-reduce: neighbouring gradients leave together, as soon as enough of them are ready.

After GradientFlow (arXiv 1902.06855): small messages waste a network on latency, so a finished gradient
waits in the pool until its contiguous run of finished neighbours reaches a threshold; the run then leaves as
one all-reduce while backward goes on. The gradients already lie side by side, so fusing them copies nothing.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import LazySync, chosen_collective, fusion_bytes
from imagenet_fast.sync.engine import Engine


def lazy(settings: LazySync, wire: torch.dtype) -> Engine:
    """A threshold of 0 sends every tensor by itself, an infinite one everything at the end of backward."""
    return Engine(
        wire,
        "backward",
        fusion_bytes(settings.threshold_mb),
        collective=chosen_collective(settings.collective),
        servers=settings.servers,
    )
