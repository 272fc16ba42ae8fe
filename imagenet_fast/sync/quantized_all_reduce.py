"""All-reduces of codes: no backend adds codes, so a block's owner decodes, adds in fp32 and encodes the sum.

Every rank encodes every value once, as a part that it sends or as a sum that it owns. Either way the error of the codes
is in the units of the sum, so one residual serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.sync.butterfly import core_of
from imagenet_fast.sync.comm_ops import OpSequence
from imagenet_fast.sync.comm_stream import CommStream
from imagenet_fast.sync.quantization import Packer, decode, encode


def coded_pairwise(
    chain: OpSequence,
    values: Tensor,
    packing: Packer,
    push: CommStream,
    pull: CommStream,
    owners: list[int],
    direct: bool,
) -> None:
    """Average ``values`` over the streams' ranks, in place, by sending codes straight to the owners of their blocks.

    The owners send the codes of the means to all ranks.

    Args:
        chain: Where the phases are added.
        values: The values to average.
        packing: The message's blocks by owner.
        push: The stream to the owners.
        pull: The stream for the means.
        owners: Places of the ranks that own blocks.
        direct: See ``CommStream.all_gather``.
    """
    ranks, everybody = push.size, len(owners) == push.size
    mine = owners.index(push.place) if push.place in owners else None
    leaving, means = packing.message(len(owners)).zero_(), packing.message(len(owners))  # a rank's own codes stay 0
    arrived = packing.message(0 if mine is None else ranks)
    parts = [packing.width if place in owners else 0 for place in range(ranks)]
    whole = [0 if mine is None else packing.width] * ranks

    def leave() -> Work | None:
        packing.load(values)
        scales, codes, plain = packing.parts(leaving)
        plain.copy_(packing.plain)
        turn = len(owners) if mine is None else mine
        for others in (slice(0, turn), slice(turn + 1, None)):  # a rank adds its own part uncoded
            if len(scales[others]):
                residual = None if packing.residual is None else packing.residual[others]
                encode(packing.coded[others], scales[others], codes[others], residual)
        if everybody:
            return push.all_to_all(arrived, leaving)
        return push.all_to_all(arrived.view(-1), leaving.view(-1), whole, parts)

    def answer() -> Work | None:
        if mine is not None:
            scales, codes, plain = packing.parts(arrived)
            own_scales, own_codes, own_plain = packing.parts(means[mine])
            total = decode(scales, codes).sum(0).add_(packing.coded[mine])
            encode(total, own_scales, own_codes, None if packing.residual is None else packing.residual[mine])
            torch.div(plain.sum(0, dtype=torch.float32), ranks, out=own_plain)
        if everybody:
            return pull.all_gather(means.view(-1), direct)
        answers = means.new_empty(0) if mine is None else means[mine].repeat(ranks)
        return pull.all_to_all(means.view(-1), answers, parts, whole)

    def land() -> None:
        scales, codes, plain = packing.parts(means)
        torch.div(decode(scales, codes), ranks, out=packing.coded)
        packing.plain.copy_(plain)
        packing.land(values)

    chain.add_collective(push, leave)
    chain.add_collective(pull, answer, second_half=True)
    chain.add_local(land)


def coded_butterfly(values: Tensor, packing: Packer, stream: CommStream) -> None:
    """Average ``values`` over ``stream``, in place, by halves and then by doubles: see ``butterfly``.

    A block's owner is the rank that ends with its sum, one of the largest power of two of ranks.
    """
    core = core_of(stream.size)
    folded = stream.place < 2 * (stream.size - len(core))  # of these, even places send to their odd neighbour
    packing.load(values)
    means = packing.message(len(core))
    if folded and stream.place % 2 == 0:
        message = packing.message(len(core))
        _write(packing, message, packing.coded, packing.plain, packing.residual)
        stream.exchange([(stream.place + 1, message)], [])
        stream.exchange([], [(stream.place + 1, means)])
    else:
        if folded:
            message = packing.message(len(core))
            stream.exchange([], [(stream.place - 1, message)])
            _add(packing, message, packing.coded, packing.plain)
        _halve_and_double(packing, means, stream, core)
        if folded:
            stream.exchange([(stream.place - 1, means)], [])
    scales, codes, plain = packing.parts(means)
    torch.div(decode(scales, codes), stream.size, out=packing.coded)
    torch.div(plain, stream.size, out=packing.plain)
    packing.land(values)


def _halve_and_double(packing: Packer, means: Tensor, stream: CommStream, members: list[int]) -> None:
    """Split the blocks by owner, lowest bit of its place first; send those of the other bit to the partner."""
    place, bits = members.index(stream.place), len(members).bit_length() - 1
    cube = (2,) * bits
    coded, plain = packing.coded.unflatten(0, cube), packing.plain.unflatten(0, cube)
    residual = None if packing.residual is None else packing.residual.unflatten(0, cube)
    known = means.unflatten(0, cube)
    halves: list[tuple[int, Tensor, Tensor]] = []  # per step: partner, half of the means to send, half to receive
    for bit in range(bits):
        partner, last = members[place ^ 1 << bit], bits - bit - 1
        ours, theirs = place >> bit & 1, ~place >> bit & 1
        leaving = packing.message(*cube[:last])
        given = None if residual is None else residual.select(last, theirs)
        _write(packing, leaving, coded.select(last, theirs), plain.select(last, theirs), given)
        arriving = torch.empty_like(leaving)
        stream.exchange([(partner, leaving)], [(partner, arriving)])
        coded, plain = coded.select(last, ours), plain.select(last, ours)
        residual = None if residual is None else residual.select(last, ours)
        halves.append((partner, known.select(last, ours), known.select(last, theirs)))
        known = known.select(last, ours)
        _add(packing, arriving, coded, plain)
    _write(packing, known, coded, plain, residual)
    for partner, ours_known, theirs_known in reversed(halves):
        arriving = torch.empty_like(theirs_known)
        stream.exchange([(partner, ours_known.contiguous())], [(partner, arriving)])
        theirs_known.copy_(arriving)


def _write(packing: Packer, message: Tensor, coded: Tensor, plain: Tensor, residual: Tensor | None) -> None:
    scales, codes, plains = packing.parts(message)
    encode(coded, scales, codes, residual)
    plains.copy_(plain)


def _add(packing: Packer, message: Tensor, coded: Tensor, plain: Tensor) -> None:
    scales, codes, plains = packing.parts(message)
    coded += decode(scales, codes)
    plain += plains
