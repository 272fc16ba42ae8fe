"""DeAR: reduce-scatter during backward, all-gather during the next forward, together no byte more than an all-reduce.

After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining"
(arXiv 2302.12445). Scatters go before gathers, and gathers go in the order in which the next forward needs them; where
the scatters leave the wire idle, gathers begin before backward has ended.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import DearSync, fusion_bytes
from imagenet_fast.sync.engine import Engine


def dear(settings: DearSync, wire: torch.dtype) -> Engine:
    """All-reduces cut in two, whose last phases are delayed."""
    return Engine(wire, "read", fusion_bytes(settings.bucket_mb), planned=True, halves=True)
