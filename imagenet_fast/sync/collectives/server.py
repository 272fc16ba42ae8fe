"""The parameter server: everybody sends to one rank, which answers everybody. What the papers start from."""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.rounding import land, landing, room, round_to
from imagenet_fast.sync.lane import Peers


def parameter_server(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum over ``peers`` in ``tensor``; rank 0 is the server, and its link carries 2 (P-1) messages."""
    if peers.rank:
        message = landing(tensor, wire)
        peers.exchange([(0, tensor.to(wire))], [])
        peers.exchange([], [(0, message)])
        land(tensor, message)
        return
    workers = range(1, peers.size)
    messages = [room(tensor, wire) for _ in workers]
    peers.exchange([], zip(workers, messages, strict=True))
    for message in messages:
        tensor += message
    result = round_to(tensor, wire)
    peers.exchange([(worker, result) for worker in workers], [])
