"""The backend's own all-reduce: gloo's or NCCL's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.sync.lane import Lane, Traffic, Transfer
from imagenet_fast.sync.marks import mark


def native(tensor: Tensor, wire: torch.dtype, lane: Lane) -> Transfer:
    """Start averaging a 1-D tensor over all ranks, in place. Backends add in the wire's own dtype.

    Values are therefore divided by the number of ranks on their way into 16 bits, while they are still fp32: in
    fp16 the sum of a few large gradients would overflow. Values that travel as they are are divided after the
    sum, which rounds an exact sum once.
    """
    ranks = len(lane.ranks)
    message = tensor if wire == tensor.dtype else torch.mul(tensor, 1 / ranks).to(wire)
    sent = ring_bytes(message.nbytes, ranks)
    traffic = Traffic(sent, sent, mark(tensor.device))
    work = dist.all_reduce(message, group=lane.group, async_op=True)
    assert work is not None

    def land(outcome: torch.futures.Future[list[Tensor]]) -> None:
        outcome.value()  # raises what the backend raised
        traffic.ended = mark(tensor.device)
        if message is tensor:
            tensor.div_(ranks)
        else:
            tensor.copy_(message)

    done = work.get_future().then(land)
    return Transfer(lambda: done.wait(), [traffic])


def ring_bytes(message: int, ranks: int) -> int:
    """Bytes each rank sends, and receives, in a bandwidth-optimal all-reduce of ``message``: 2 (P-1)/P of them."""
    return 2 * (ranks - 1) * message // ranks
