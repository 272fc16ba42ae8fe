"""The ring: buckets are sent during backward around a ring of nodes, which needs the fewest bytes possible.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The ring is the
backend's: gloo's all-reduce always is one. NCCL uses one for long messages, or always with ``NCCL_ALGO=ring``.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.sync_config import RingSync, fusion_bytes
from imagenet_fast.sync.engine import Engine


def ring(settings: RingSync, wire: torch.dtype) -> Engine:
    """Declare the engine: buckets of neighbouring gradients, overlapped with backward."""
    return Engine(wire, "backward", fusion_bytes(settings.bucket_mb), collective="ring")
