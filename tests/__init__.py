"""Tests, in the folders of the packages that they test; what they share is beside this file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from imagenet_fast.distributed.init import DistContext

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as `imagenet-fast` has it: no pages of C++ stack frames


def world(
    rank: int | None = None, size: int | None = None, local_rank: int | None = None, local_size: int | None = None,
    device: torch.device | None = None, bf16: bool | None = None,
) -> DistContext:  # fmt: skip
    """Return this process among all ranks: those of its process group, all on one node, or it alone.

    What is given replaces what the group says; ``bf16`` is what ``device``, a CPU, can do.
    """
    import torch
    import torch.distributed as dist

    from imagenet_fast.distributed.init import DistContext, computes_bf16

    device = device or torch.device("cpu")
    there = dist.is_initialized()
    rank = rank if rank is not None else dist.get_rank() if there else 0
    size = size if size is not None else dist.get_world_size() if there else 1
    return DistContext(
        rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size, device,
        bf16=computes_bf16(device) if bf16 is None else bf16,
    )  # fmt: skip
