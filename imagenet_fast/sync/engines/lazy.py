"""Lazy all-reduce: neighbouring gradients are sent together, as soon as enough of them are ready.

After GradientFlow (arXiv 1902.06855): small messages waste a network on latency. So a finished gradient waits in the
pool until the bucket of its finished neighbours reaches a threshold. The bucket is then sent as one all-reduce while
backward continues. The gradients already lie side by side, so fusing them copies nothing.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import LazySync, chosen_collective, fusion_bytes
from imagenet_fast.sync.engine import Engine


def lazy(settings: LazySync, wire: torch.dtype) -> Engine:
    """Declare the engine: a threshold of 0 sends each tensor alone, an infinite one all at the end of backward."""
    return Engine(
        wire,
        "backward",
        fusion_bytes(settings.threshold_mb),
        collective=chosen_collective(settings.collective),
        servers=settings.servers,
    )
