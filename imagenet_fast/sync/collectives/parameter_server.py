"""The parameter-server all-reduce, the papers' starting point: ranks send to servers, which answer all ranks."""

from __future__ import annotations

from torch import Tensor

from imagenet_fast.sync.collectives.comm_ops import OpSequence, mean_of
from imagenet_fast.sync.comm_stream import CommStream


def parameter_server(chain: OpSequence, values: Tensor, push: CommStream, pull: CommStream, servers: int) -> None:
    """Average ``values`` over the channels' ranks, in place; each of ``servers`` ranks adds up a part in fp32.

    A server's link carries P-1 parts in and P-1 parts out. Ranks send to the servers over ``push``, and servers answer
    over ``pull``.
    """
    ranks, servers = push.size, min(servers, push.size)
    parts = [0] * ranks
    for place, part in zip(server_places(ranks, servers), values.tensor_split(servers), strict=True):
        parts[place] = part.numel()
    own = parts[push.place]  # 0 unless this rank is a server
    arrived = values.new_empty(own * ranks)
    chain.over(push, lambda: push.all_to_all(arrived, values, [own] * ranks, parts))

    def answer() -> Tensor:
        mean = values.new_empty(own)
        if own:
            mean_of(arrived, ranks, ranks, mean)
        return mean.repeat(ranks)

    chain.over(pull, lambda: pull.all_to_all(values, answer(), parts, [own] * ranks), gathers=True)


def server_places(ranks: int, servers: int) -> list[int]:
    """Return the places of the servers, spread evenly among the ranks."""
    servers = min(servers, ranks)
    return [number * ranks // servers for number in range(servers)]


def server_bytes(ranks: int, servers: int) -> float:
    """Return what a server sends, its own parts and its answers, in units of what each rank sends in a ring."""
    servers = min(servers, ranks)
    if ranks == 1:
        return 1.0
    return ((servers - 1) + (ranks - 1)) / servers * ranks / (2 * (ranks - 1))
