"""The two halves of an all-reduce by the backend's vector operations: each rank owns a part of the values.

Each part is sent straight to its owner, which adds up in fp32, rounds once and sends the mean to all. That is a ring's
bytes in two calls, whatever the number of ranks. On a 16-bit wire the error does not grow with the number of ranks, as
it does where partial sums are rounded at every hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.comm_ops import OpSequence, mean_of
from imagenet_fast.sync.comm_stream import CommStream


def scatter(chain: OpSequence, values: Tensor, channel: CommStream, own: Tensor | None, divisor: int) -> Tensor:
    """Add the phase that sums this rank's part of ``values`` over the channel and divides it by ``divisor``.

    Args:
        chain: Where the phase is added.
        values: 1-D, with one part per rank.
        channel: The ranks.
        own: Where the result is written, or None for this rank's part of ``values``.
        divisor: Number by which the sum is divided.

    Returns:
        The tensor that holds the result once the phase is done.
    """
    into = values.view(channel.size, -1)[channel.place] if own is None else own
    if own is None and divisor == channel.size and values.dtype == torch.float32 and values.is_cuda:
        chain.over(channel, lambda: channel.reduce_scatter(values))  # NCCL adds fp32 itself, without a copy
        return into
    arrived = torch.empty_like(values)
    chain.over(channel, lambda: channel.all_to_all(arrived, values))
    chain.locally(lambda: mean_of(arrived, channel.size, divisor, into))
    return into


def gather(chain: OpSequence, values: Tensor, channel: CommStream, alone: bool) -> None:
    """Add the phase that sends every rank's part of ``values`` to all ranks.

    Args:
        chain: Where the phase is added.
        values: 1-D, with one part per rank.
        channel: The ranks.
        alone: Whether few scatters share the wire, so that parts are best sent directly: see ``CommStream.all_gather``.
    """
    chain.over(channel, lambda: channel.all_gather(values, direct=alone), gathers=True)
