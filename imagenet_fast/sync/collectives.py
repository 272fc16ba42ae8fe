"""All-reduce as a free function over a flat tensor: it starts at once and returns something to wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """An all-reduce under way; ``wait`` leaves the mean over ranks in the tensor it was started on."""

    work: dist.Work | None
    tensor: Tensor
    wire: Tensor
    divisor: int
    sent_bytes: int

    def wait(self) -> None:
        if self.work is None:
            return
        self.work.wait()
        if self.wire.dtype != self.tensor.dtype:
            self.tensor.copy_(self.wire)
        if self.divisor > 1:
            self.tensor.div_(self.divisor)


def native(tensor: Tensor, wire: Tensor) -> Transfer:
    """Start the backend's own all-reduce (gloo's or NCCL's) of a 1-D tensor, in place, to the mean.

    ``wire`` is what travels: ``tensor`` itself, or as many elements of a 16-bit dtype, which must stay
    untouched until ``wait``. Values are divided by the number of ranks on their way into 16 bits, while they
    are still fp32: in fp16 the sum of a few large gradients would overflow. Values that travel as they are
    are divided after the sum, which rounds an exact sum once. One rank has no wire: nothing is sent and
    nothing is rounded.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return Transfer(None, tensor, wire, 1, 0)
    cast = wire.dtype != tensor.dtype
    if cast:
        torch.mul(tensor, 1 / ranks, out=wire)
    work = dist.all_reduce(wire, async_op=True)
    return Transfer(work, tensor, wire, 1 if cast else ranks, ring_bytes(wire.nbytes, ranks))


def ring_bytes(message: int, ranks: int) -> int:
    """Bytes each rank sends in a bandwidth-optimal all-reduce of ``message`` bytes: 2 (P-1)/P of them."""
    return 2 * (ranks - 1) * message // ranks


def wire_buffer(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for ``buffer``'s values as ``dtype``; the buffer itself where nothing needs casting."""
    if dtype == buffer.dtype or dist.get_world_size() == 1:
        return buffer
    return torch.empty_like(buffer, dtype=dtype)
