"""The ring: buckets leave during backward and go round a ring of nodes, which sends the least there is.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The ring is the
backend's: gloo's all-reduce always is one, NCCL takes one for long messages (or always, with ``NCCL_ALGO=ring``).
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import RingSync, fusion_bytes
from imagenet_fast.sync.engine import Engine


def ring(settings: RingSync, wire: torch.dtype) -> Engine:
    """Buckets of neighbouring gradients, overlapped with backward."""
    return Engine(wire, "backward", fusion_bytes(settings.bucket_mb), collective="ring")
