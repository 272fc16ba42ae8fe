"""DeAR: reduce-scatter during backward, all-gather during the next forward, in total an all-reduce's bytes.

After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining" (arXiv
2302.12445). Scatters are sent before gathers, and gathers in the order in which the next forward needs them. Where
scatters leave the wire idle, gathers begin before backward has ended.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import DearSync, fusion_bytes
from imagenet_fast.sync.engine import Engine


def dear(settings: DearSync, wire: torch.dtype) -> Engine:
    """Declare the engine: all-reduces are cut in two, and their last phases are delayed."""
    return Engine(wire, "read", fusion_bytes(settings.bucket_mb), planned=True, halves=True)
