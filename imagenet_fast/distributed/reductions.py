"""What all ranks hold alike: initial weights, batch-norm statistics, sums, maxima, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext


def broadcast_model(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # not a set, whose order differs between ranks
        alike = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        with here.waiting():
            dist.broadcast(flat, src=0)
        _scatter(flat, alike)


def average_batch_norms(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the running statistics of every rank of ``group``, by default of all, by their mean over these.

    Each rank normalises by the images it saw, so the running means and variances drift apart; an evaluation
    or a save must come from one model.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    running = [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]
    if running:
        flat = torch.cat(running)
        with here.waiting():
            dist.all_reduce(flat, group=group)
        _scatter(flat.div_(dist.get_world_size(group)), running)


def all_reduce_sum(*values: float, device: torch.device) -> list[float]:
    """The sum of each value over all ranks, added in float64."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    with here.waiting():
        dist.all_reduce(sums)
        return [float(value) for value in sums]


def gather_rows(own: Sequence[float], world: DistContext) -> Tensor:
    """The values that each rank tells, a row a rank, float64 on the device. With NCCL the host waits for nothing."""
    cuda = world.device.type == "cuda"
    rows = torch.zeros(world.size, len(own), dtype=torch.float64, device=world.device)
    rows[world.rank].copy_(torch.tensor(own, dtype=torch.float64, pin_memory=cuda), non_blocking=cuda)
    with here.waiting():
        dist.all_reduce(rows)
    return rows


def broadcast_error(refusal: str, device: torch.device) -> str:
    """What rank 0 refuses, in a sentence, on every rank; nothing where it refuses nothing. Others' are not heard."""
    said = [refusal]
    with here.waiting():
        dist.broadcast_object_list(said, src=0, device=device)
    return said[0]


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
