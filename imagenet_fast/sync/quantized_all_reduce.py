"""All-reduces of codes: no backend adds codes, so a block's owner decodes, adds in fp32 and encodes the sum.

Every rank encodes every value once, as a part that it sends or as a sum that it owns. Either way the error of the codes
is in the units of the sum, so one residual serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.sync.comm_ops import OpSequence
from imagenet_fast.sync.comm_stream import CommStream
from imagenet_fast.sync.quantization import Packer, decode, encode


def coded_pairwise(
    chain: OpSequence, values: Tensor, packing: Packer, push: CommStream, pull: CommStream, direct: bool
) -> None:
    """Average ``values`` over the streams' ranks, in place, by sending codes straight to the owners of their blocks.

    ``push`` leads to the owners; they send the codes of the means to all ranks, by ``pull``, ``direct`` or not (see
    ``CommStream.all_gather``).
    """
    ranks, mine = push.size, push.place
    leaving, arrived, means = packing.message(ranks).zero_(), packing.message(ranks), packing.message(ranks)

    def leave() -> Work | None:
        packing.load(values)
        scales, codes, plain = packing.parts(leaving)
        plain.copy_(packing.plain)
        for others in (slice(0, mine), slice(mine + 1, None)):  # a rank adds its own part uncoded: its codes stay 0
            if len(scales[others]):
                left = None if packing.residual is None else packing.residual[others]
                encode(packing.coded[others], scales[others], codes[others], left)
        return push.all_to_all(arrived, leaving)

    def answer() -> Work | None:
        scales, codes, plain = packing.parts(arrived)
        own_scales, own_codes, own_plain = packing.parts(means[mine])
        left = None if packing.residual is None else packing.residual[mine]
        encode(decode(scales, codes).sum(0).add_(packing.coded[mine]), own_scales, own_codes, left)
        torch.div(plain.sum(0, dtype=torch.float32), ranks, out=own_plain)
        return pull.all_gather(means.view(-1), direct)

    def land() -> None:
        scales, codes, plain = packing.parts(means)
        torch.div(decode(scales, codes), ranks, out=packing.coded)
        packing.plain.copy_(plain)
        packing.land(values)

    chain.add_collective(push, leave)
    chain.add_collective(pull, answer, second_half=True)
    chain.add_local(land)
