"""Collectives for values that all ranks share: initial weights, batch-norm statistics, sums, rows, errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext


def broadcast_model(model: nn.Module) -> None:
    """Copy the weights and buffers of rank 0 to every rank."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # not a set, whose order differs between ranks
        alike = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        with here.waiting():
            dist.broadcast(flat, src=0)
        _scatter(flat, alike)


def average_batch_norms(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the running statistics on every rank of ``group`` by their mean over the group.

    Each rank normalises by its own images, so the running means and variances drift apart. An evaluation or a
    checkpoint needs a single model.

    Args:
        model: Model whose batch norms are averaged in place.
        group: Process group to average over; None for all ranks.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    running = [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]
    if running:
        flat = torch.cat(running)
        with here.waiting():
            dist.all_reduce(flat, group=group)
        _scatter(flat.div_(dist.get_world_size(group)), running)


def all_reduce_sum(*values: float, device: torch.device) -> list[float]:
    """Return the sum of each value over all ranks, added in float64."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    with here.waiting():
        dist.all_reduce(sums)
        return [float(value) for value in sums]


def gather_rows(own: Sequence[float], world: DistContext) -> Tensor:
    """Return the values of all ranks as a float64 tensor on the device, one row per rank.

    With NCCL this does not block the CPU.
    """
    cuda = world.device.type == "cuda"
    rows = torch.zeros(world.size, len(own), dtype=torch.float64, device=world.device)
    rows[world.rank].copy_(torch.tensor(own, dtype=torch.float64, pin_memory=cuda), non_blocking=cuda)
    with here.waiting():
        dist.all_reduce(rows)
    return rows


def broadcast_error(refusal: str, device: torch.device) -> str:
    """Return rank 0's error message on every rank, or an empty string if there is none.

    The ``refusal`` of other ranks is ignored.
    """
    said = [refusal]
    with here.waiting():
        dist.broadcast_object_list(said, src=0, device=device)
    return said[0]


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
