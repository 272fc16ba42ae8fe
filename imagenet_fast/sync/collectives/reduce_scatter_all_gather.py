"""The two halves of an all-reduce by the backend's vector operations: each rank owns a part of the values.

Each part goes straight to its owner, who adds them up in fp32, rounds once and sends the mean to all: a ring's bytes in
two calls, whatever the number of ranks. On a 16-bit wire the error does not grow with the ranks, as it does where
partial sums are rounded at every hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.comm_ops import OpSequence, mean_of
from imagenet_fast.sync.comm_stream import CommStream


def scatter(chain: OpSequence, values: Tensor, channel: CommStream, own: Tensor | None, divisor: int) -> Tensor:
    """Leave the channel's sum of this rank's part of ``values``, over ``divisor``, in ``own``, or else in that part.

    Returns where it is.
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
    """Spread every rank's part of ``values`` to all; ``alone``: with few scatters on the wire beside it."""
    chain.over(channel, lambda: channel.all_gather(values, direct=alone), gathers=True)
