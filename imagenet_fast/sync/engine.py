"""The seam: what an engine is, and what it reports of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.recipe.sync_config import Collective
from imagenet_fast.sync.collectives import AllReduceHandle
from imagenet_fast.sync.compression import Compressor
from imagenet_fast.sync.device_timer import Timestamp, record_timestamp, seconds_between
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot

Bucket = Sequence[ParamSlot]
"""Neighbouring spans that travel together."""

Elements = dict[nn.Parameter, list[slice]]
"""Of parameters, which elements, in the order they lie in memory."""


def alike(span: ParamSlot) -> None:
    """All spans are of one kind."""


@dataclass(frozen=True)
class Engine:
    """What travels together and how, when it leaves, and when it is awaited. A scheduler does the rest."""

    wire: torch.dtype
    awaits: Literal["each", "backward", "read"]
    """``each``: after backward, one message after the other. ``backward``: messages leave during backward and are
    waited for at its end. ``read``: a layer is waited for just before the next forward reads it."""
    fuse: float | None = None
    """Bytes on the wire from which on a run leaves; None: the best by the cost model, once steps have been watched."""
    first: float = 1.0
    """The first run leaves at this share of it."""
    together: Callable[[ParamSlot], Hashable] = alike
    """Only neighbours of one kind travel together."""
    collective: Collective | Callable[[Bucket, NetworkProbe], Collective] | None = None
    """How, or what decides it for a run; None: the usual one."""
    servers: int = 1
    """Of a parameter server."""
    planned: bool = False
    """Whether messages leave by a plan, the most urgent first, once steps have been watched; else at once."""
    bf16_steps: int = 0
    """The first so many steps travel in bf16, where the wire is one of codes."""
    halves: bool = False
    """Whether the second half of an all-reduce leaves by itself, later; of a compressor's rounds, those after the
    first."""
    compressor: Compressor | None = None
    """What makes of a run what travels instead; None: its gradients as they are, cut into pieces."""

    @property
    def learns(self) -> bool:
        """Whether it needs to watch some steps and the network."""
        return self.planned or self.fuse is None


class Stopwatch:
    """Seconds spent inside ``with stopwatch(label):`` blocks, in the time of the device that has to wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: list[tuple[str, Timestamp, Timestamp]] = []
        """What was waited for, from when to when."""

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        begun = record_timestamp(self._device)
        try:
            with here.waiting() if self._device.type == "cpu" else nullcontext():  # a GPU's host goes on
                yield
        finally:
            self.blocks.append((label, begun, record_timestamp(self._device)))

    def seconds(self) -> float:
        """The total so far. Waits for the GPU to pass the last block."""
        return sum(seconds_between(begin, end) for _, begin, end in self.blocks)


@dataclass
class SyncStats:
    """What one step's synchronisation cost this rank."""

    exposed: Stopwatch | None
    """Time the step stood still for communication; None where it cannot be told."""
    transfers: list[tuple[str, AllReduceHandle]] = field(default_factory=list)
    """What was sent, by the layers it was for. A deferring engine counts it in the step that waits for it."""
    decision: tuple[Prediction, ...] = ()
    """In the step after which ``auto`` has chosen: what it chose from."""

    def add(self, label: str, transfer: AllReduceHandle) -> None:
        """Count a transfer that has ended."""
        self.transfers.append((label, transfer))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank put on the wire, by the arithmetic of the operations that it called."""
        return sum(part.sent_bytes for _, transfer in self.transfers for part in transfer.traffic)

    @property
    def received_bytes(self) -> int:
        return sum(part.received_bytes for _, transfer in self.transfers for part in transfer.traffic)

    @property
    def launches(self) -> int:
        """Messages sent."""
        return len(self.transfers)


class SyncEngine(Protocol):
    """What the pool asks of an engine at work. After :meth:`finish` every span that is not deferred holds the same
    values on every rank; a deferred one does after :meth:`wait`. An exact engine's values are the mean over ranks.

    Engines derive from this class and write what differs.
    """

    defers: bool = False
    """Whether gradients may still be on their way after ``finish``, until ``wait``."""

    leaves_behind: bool = False
    """Whether a step may send some elements of a parameter and not the others: see :meth:`elements`."""

    @property
    def has_residual(self) -> bool:
        """Whether it adds to a step's gradients what earlier steps have left behind."""
        return self.leaves_behind

    elected: str = ""
    """By what name ``auto`` has chosen it, if it has."""

    candidates: Collection[str] = ()
    """What an engine that chooses may :meth:`elect`, by name."""

    state_keys: frozenset[str] = frozenset()
    """What it has to find in a state, unless that is empty."""

    needs_state: bool = False
    """Whether it cannot go on from an empty one."""

    def lay_out(self) -> None:
        """The pool's spans have new places: nothing is under way."""
        return

    def begin(self) -> None:
        """Before the first gradient of a step comes into the pool, and before that is laid out anew."""
        return

    def start_step(self) -> None:
        """After :meth:`begin`: the first gradient comes."""
        return

    def scale_residual(self, ratio: Tensor) -> None:
        """Multiply what earlier steps have left behind, for gradients come at another loss scale now. Nothing is under
        way. ``ratio``: fp32 [], on the device."""
        return

    def take(self, place: Tensor, gradient: Tensor | None) -> None:
        """Bring a gradient of backward into its place in the pool; None: backward did not reach it."""
        if gradient is None:
            place.zero_()
        else:
            place.copy_(gradient)

    def spoil(self, span: ParamSlot, gradient: Tensor) -> None:
        """What this step is to send of a span becomes NaN, for backward has failed."""
        gradient.fill_(math.nan)

    def push(self, span: ParamSlot) -> None:
        """In backward: this span's local gradient is final. Called in pool order, once a step. Before it changes or
        sends what lies there, it calls ``pool.measure()``."""

    def finish(self, drop: bool = False) -> SyncStats:
        """End of backward: agree on all that may not be deferred, and report the step.

        ``drop``: nobody will apply it, so the residual is to be what it was before; afterwards nothing is under way.
        """
        ...

    def wait(self, span: ParamSlot) -> None:
        """Before this span's parameters are read again: make sure they are up to date."""
        return

    def has_arrived(self, span: ParamSlot) -> bool:
        """Whether :meth:`wait` has nothing left to wait for, where that is known without asking a device."""
        return False

    def elements(self) -> Elements | None:
        """What of the parameters the last step has synchronised and may be updated; None: everything."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, such as residuals and plans; nothing is under way afterwards."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value: bit for bit, if that is of as many ranks."""
        if state:
            raise ValueError(f"this engine keeps no state, got {', '.join(sorted(state))}; attach the one that kept it")

    def elect(self, name: str) -> None:
        """Of an engine that chooses: hand the pool to the candidate ``name``, which has been chosen before."""
        raise AssertionError(f"this engine has no candidates, such as {name}")

    def close(self) -> None:
        """Its work is over."""
        return

    def drop(self) -> None:
        """Its work is over in the middle of a step: wait for no message, for other ranks may never send theirs."""
        return
