"""Measurements of the network and of quantisation. All ranks use the results of the first rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.cost_model.collectives import cost_of, piece_bytes, piece_elements
from imagenet_fast.cost_model.messages import Links, lane_of
from imagenet_fast.cost_model.step_simulator import NO_CODEC, CodecCost, LinkModel
from imagenet_fast.distributed.device_timer import record_timestamp, seconds_between
from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.sync.all_reduce import all_reduce, format_of
from imagenet_fast.sync.comm_stream import launch
from imagenet_fast.sync.quantization import PLAIN, Packer, all_coded, decode, encode, is_coded
from imagenet_fast.sync.topology import Topology

_TINY = 2**13  # bytes
_SHORT_AND_LONG = {"cpu": (2**20, 2**22), "cuda": (2**24, 2**27)}
"""Two message sizes in bytes, by device. The difference of their times cancels what a link can burst."""
_REPEATS = 4
_MANY = 8  # messages launched at once, so that their latencies overlap


class NetworkProbe(Links):
    """The link of each collective and the cost of 8-bit codes, measured when first requested.

    Every rank must make the same requests in the same order, with nothing else in flight.
    """

    def __init__(self, topology: Topology, wire: torch.dtype, stated: LinkModel | None = None) -> None:
        """Create a probe that has measured nothing.

        Args:
            topology: The ranks to measure between.
            wire: The dtype in which values are sent.
            stated: The link of every collective, instead of measurements; quantising then costs nothing.
        """
        self.topology, self.layout = topology, topology.layout
        self._wire = PLAIN if is_coded(wire) else wire  # the cost of quantisation is not the network's
        self._stated = stated
        self._links: dict[Collective, LinkModel] = {}
        self._codecs: dict[torch.dtype, CodecCost] = {}

    def link(self, collective: Collective) -> LinkModel:
        """Return the link of ``collective``, measured at the first call; with one rank, a link without cost."""
        if self._stated is not None:
            return self._stated
        if self.topology.size == 1:
            return LinkModel(0.0, 0.0)
        if collective not in self._links:
            self._links[collective] = measure_link(collective, self._wire, self.topology)
        return self._links[collective]

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far."""
        links = {collective: astuple(link) for collective, link in self._links.items()}
        codecs = {str(wire).removeprefix("torch."): astuple(cost) for wire, cost in self._codecs.items()}
        return {"links": links, "codecs": codecs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use a value of ``state_dict`` as this probe's measurements."""
        self._links = {collective: LinkModel(*figures) for collective, figures in state["links"].items()}
        self._codecs = {getattr(torch, wire): CodecCost(*figures) for wire, figures in state["codecs"].items()}

    def codec(self, wire: torch.dtype) -> CodecCost:
        """Return the cost of quantising to ``wire``, measured at the first call.

        It is zero for one rank, for dtypes of more than 8 bits, and with ``stated``.
        """
        if wire not in self._codecs and is_coded(wire) and self._stated is None and self.topology.size > 1:
            self._codecs[wire] = measure_codec(wire, self.topology)
        return self._codecs.get(wire, NO_CODEC)


def measure_link(collective: Collective, wire: torch.dtype, topology: Topology) -> LinkModel:
    """Measure the latency, the seconds per byte and the cost per call of ``collective``.

    Time messages of three sizes, cut into the pieces that are really sent, and several tiny messages at once. The
    fastest of four repeats counts. Every rank returns the first rank's result, so that all make the same decisions.
    Bytes are those of a ring: see ``cost_of``.

    Every rank must call it, with nothing else in flight. The values already have the wire dtype: casts of fresh memory
    take up to a third of the time on a CPU, and are not a property of the network.
    """
    piece, (short, long) = piece_bytes(topology.layout), _SHORT_AND_LONG[topology.device.type]

    def fastest(sizes: Sequence[int]) -> float:
        lengths = [topology.padded(size // wire.itemsize) for size in sizes]
        tries = ([torch.zeros(n, dtype=wire, device=topology.device) for n in lengths] for _ in range(_REPEATS))
        return min(_seconds(all_reduces(values, collective, topology), topology) for values in tries)

    latency_s, many_s = fastest([_TINY]), fastest([_TINY] * _MANY)
    short_s, long_s = fastest(_pieces(short, piece)), fastest(_pieces(long, piece))
    s_per_byte = max(0.0, long_s - short_s) / (long - short)
    call_s = max(0.0, (many_s - latency_s) / (_MANY - 1) - _TINY * s_per_byte)
    return LinkModel(*topology.of_first_rank([latency_s, s_per_byte / cost_of(collective, topology.layout), call_s]))


def all_reduces(messages: Sequence[Tensor], collective: Collective, topology: Topology) -> Callable[[], None]:
    """Return a function that averages ``messages`` in their own dtype, launched at once as an engine would, and waits.

    It can be called again; every rank must make and call it alike.
    """
    ops = [
        all_reduce(message, message.dtype, collective, topology, lane=lane_of(number, topology.layout.on_gpu))
        for number, message in enumerate(messages)
    ]

    def once() -> None:
        for wait in [wait for of_one in ops for wait in launch(of_one)]:
            wait()

    return once


def measure_codec(wire: torch.dtype, topology: Topology) -> CodecCost:
    """Measure the seconds per byte on the wire of encoding and decoding 8-bit codes.

    Time several pieces, so that values are no longer in the caches, as with gradients. The fastest of four repeats
    counts, and every rank returns the first rank's result. Every rank must call it: ranks of a node share its memory
    bandwidth, so all are timed at once.
    """
    elements = piece_elements(topology.layout, format_of(wire))
    pieces = [torch.randn(elements, device=topology.device) for _ in range(_MANY)]
    packings = [Packer(all_coded(elements), topology.size, topology.device) for _ in pieces]
    messages = [packing.message(topology.size) for packing in packings]
    for packing in packings:
        packing.residual = torch.zeros_like(packing.coded)

    def write(values: Tensor, packing: Packer, message: Tensor) -> None:
        scales, codes, _ = packing.parts(message)
        packing.load(values)
        encode(packing.coded, scales, codes, packing.residual)

    def read(values: Tensor, packing: Packer, message: Tensor) -> None:
        scales, codes, _ = packing.parts(message)
        decode(scales, codes).sum(0)  # for the op in which parts are summed
        packing.coded.copy_(decode(scales, codes))  # for the op in which means are received
        packing.land(values)

    def fastest(work: Callable[[Tensor, Packer, Tensor], None]) -> float:
        def once() -> None:
            for piece in zip(pieces, packings, messages, strict=True):
                work(*piece)

        return min(_seconds(once, topology) for _ in range(_REPEATS))

    size = sum(message.nbytes for message in messages)
    figures = [fastest(work) / size for work in (write, read)]
    return CodecCost(*topology.of_first_rank(figures))


def _pieces(size: int, piece: int) -> list[int]:
    """Return the bytes of each piece of ``size`` bytes cut into pieces of at most ``piece``."""
    return [min(piece, size - start) for start in range(0, size, piece)]


def _seconds(work: Callable[[], None], topology: Topology) -> float:
    """Return the seconds of ``work``, which all ranks begin at once, on the device's clock.

    A GPU's host takes longer to launch a message than its links take to send it.
    """
    dist.barrier(topology.group)
    begun = record_timestamp(topology.device)
    work()
    return seconds_between(begun, record_timestamp(topology.device))
