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
        if self.divisor > 1:
            torch.div(self.wire, self.divisor, out=self.tensor)
        elif self.wire.dtype != self.tensor.dtype:
            self.tensor.copy_(self.wire)


def native(tensor: Tensor, wire: Tensor) -> Transfer:
    """Start the backend's own all-reduce (gloo's or NCCL's) of a 1-D tensor, in place, to the mean.

    ``wire`` is what travels: ``tensor`` itself, or as many elements of a 16-bit dtype, which must stay
    untouched until ``wait``. fp16 is divided by the number of ranks before the sum, since the sum of a few
    large gradients overflows it; bf16 and fp32 after, which rounds once less. One rank has no wire: nothing
    is sent and nothing is rounded.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return Transfer(None, tensor, wire, 1, 0)
    divide_first = wire.dtype == torch.float16
    if divide_first:
        torch.mul(tensor, 1 / ranks, out=wire)
    elif wire.dtype != tensor.dtype:
        wire.copy_(tensor)
    work = dist.all_reduce(wire, async_op=True)
    return Transfer(work, tensor, wire, 1 if divide_first else ranks, ring_bytes(wire.nbytes, ranks))


def ring_bytes(message: int, ranks: int) -> int:
    """Bytes each rank sends in a bandwidth-optimal all-reduce of ``message`` bytes: 2 (P-1)/P of them."""
    return 2 * (ranks - 1) * message // ranks


def wire_buffer(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for ``buffer``'s values as ``dtype``; the buffer itself where nothing needs casting."""
    if dtype == buffer.dtype or dist.get_world_size() == 1:
        return buffer
    return torch.empty_like(buffer, dtype=dtype)
