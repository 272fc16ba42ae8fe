"""The engine interface: the methods that the pool calls, and a step's statistics."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.distributed.device_timer import Stopwatch
from imagenet_fast.sync.comm_stream import Transfer, Wait
from imagenet_fast.sync.param_slot import ParamSlot

Elements = dict[nn.Parameter, list[slice]]
"""The selected elements of each parameter, as slices in memory order."""

_TIMED = 7
"""Where each layer waits for its own messages on a GPU, one step of so many is timed: events cost the host time."""


@dataclass
class SyncStats:
    """The cost of one step's synchronisation on this rank."""

    exposed: Stopwatch | None
    """The time the step waited for communication; None if it was not timed."""
    sent_bytes: int = 0
    """Bytes that this rank sent, computed from the operations that it called.

    A deferring engine counts a message in the step that waits for it.
    """
    launches: int = 0
    """The number of messages sent."""
    decision: tuple[Prediction, ...] = ()
    """The predictions that ``auto`` chose from, in the step after which it chose; else empty."""

    @classmethod
    def of_step(cls, device: torch.device, step: int, defers: bool) -> SyncStats:
        """Begin to count a step of an engine, which ``defers`` or not, and decide whether its waits are timed."""
        timed = device.type != "cuda" or not defers or Transfer.record is not None or step % _TIMED == 3
        return cls(Stopwatch(device) if timed else None)

    def wait(self, messages: Sequence[tuple[str, Sequence[Wait]]]) -> None:
        """Wait for messages, each with its label. A timeline has the time of each, other steps have that of all."""
        if Transfer.record is None:
            messages = [("messages", [wait for _, waits in messages for wait in waits])]
        for label, waits in messages:
            with nullcontext() if self.exposed is None or not waits else self.exposed(label):
                for wait in waits:
                    wait()

    def count(self, sent_bytes: int) -> None:
        """Count a message that was sent."""
        self.sent_bytes += sent_bytes
        self.launches += 1


class SyncEngine(Protocol):
    """The methods that the pool calls on an engine. Engines derive from this class and override what differs.

    After ``finish`` every slot that is not deferred holds the same values on every rank. A deferred slot does so after
    ``wait``. The values of an exact engine are the mean over ranks.
    """

    defers: bool = False
    """True if gradients may still be in flight after ``finish``, until ``wait``."""

    sends_part: bool = False
    """True if a step may send only some elements of a parameter: see ``sent_slices``."""

    adds_momentum: bool = False
    """True if gradients contain momentum, so that the optimizer must add none."""

    is_local: bool = False
    """True if the engine neither sends nor changes gradients, as on one rank: they stay where autograd has put them."""

    elected: str = ""
    """Its name among the candidates of ``auto``, if that has chosen it."""

    captures: bool = False
    """True while a step is captured in a CUDA graph: nothing of it runs or is counted."""

    @property
    def is_steady(self) -> bool:
        """True if all later steps make the same calls on the same memory, so that a CUDA graph can hold one."""
        return False

    def rebuild_buckets(self) -> None:
        """Adapt to new places of the pool's slots. Nothing is in flight when it is called."""
        return

    def begin(self) -> SyncEngine:
        """Return the engine that takes the next step, which every rank begins: itself, or one that it has chosen."""
        return self

    def go_on_as(self, elected: str) -> SyncEngine:
        """Return the engine that loads a state of ``auto``, after it had chosen the engine ``elected``; empty: before.

        Raises:
            ValueError: It would be another one.
        """
        if elected not in ("", self.elected):
            raise ValueError(
                f"this state is of the time after auto had chosen {elected}, and here it has not; take auto with the "
                "settings that it had, and load the state before the first step"
            )
        return self

    def start(self) -> None:
        """Prepare for changes to the pool: before the first gradient of a step, and before a new layout."""
        return

    def store_gradients(self, places: list[Tensor], gradients: list[Tensor]) -> None:
        """Put gradients of backward into their ``places`` in the pool, each once a step."""
        torch._foreach_copy_(places, gradients)

    def store_unused(self, place: Tensor) -> None:
        """Put zero into the ``place`` of a parameter that backward did not reach, 1-D, its flag the last element."""
        place.zero_()

    def gradient_ready(self, slot: ParamSlot) -> None:
        """Accept the final local gradient of ``slot``. Called in pool order, once a step for each slot.

        The engine must call ``pool.fill()`` before it reads or sends the gradient: not before is it in the pool.
        """

    def finish(self) -> SyncStats:
        """End a step's backward: synchronise everything that is not deferred, and return the step's statistics."""
        ...

    def spoil(self) -> None:
        """Put NaN into something that the step has still to send, unless it sends the last slot, which has NaN."""
        return

    def forget_nonfinite(self) -> None:
        """Set to zero what is not finite in the residual, as the step that it is of was dropped. All was waited for."""
        return

    def wait(self, slot: ParamSlot) -> None:
        """Wait until the gradient of ``slot`` is synchronised. Called before its parameter is read again."""
        return

    def has_arrived(self, slot: ParamSlot) -> bool:
        """Return whether ``wait`` would return at once, as far as is known without a device synchronisation."""
        return False

    def sent_slices(self) -> Elements | None:
        """Return the elements that the last step synchronised and that may be updated; None means all."""
        return None

    def capture(self) -> AbstractContextManager[None]:
        """Return a context in which a step is captured, and which takes it back if it is left by an exception."""
        return nullcontext()

    def replayed(self) -> None:
        """Count a step that a CUDA graph has taken, and launch what the graph leaves out."""
        return

    def residuals(self) -> list[Tensor]:
        """Return the tensors, besides the pool, that a step leaves to the next one."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, such as residuals and plans. Nothing is in flight afterwards."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``: bit for bit, if that was saved with the same number of ranks.

        Raises:
            ValueError: The state is another engine's.
        """
        if state:
            refuse_state_of_another(self, state, {"an engine that keeps one"})

    def close(self) -> None:
        """Wait for all messages. Not called in the middle of a step, which other ranks may have left."""
        return


def refuse_state_of_another(engine: SyncEngine, state: dict[str, Any], keys: Set[str]) -> None:
    """Raise ValueError if a state that is to be loaded lacks one of ``keys``, because it is another engine's."""
    if not keys <= state.keys():
        raise ValueError(
            f"this state is of another engine than {type(engine).__name__.lower()}; take that engine, with the same "
            "settings, or begin without its state"
        )
