"""Position of each rank: its step, its phase and for how long; and the messages about it when a run fails.

The training thread records its position by a write to memory, which takes some hundred nanoseconds. The watchdog thread
(``imagenet_fast.distributed.watchdog``) publishes it for other ranks and the launcher. So the last position of a rank
that was killed or stopped is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.distributed.board import Board
from imagenet_fast.distributed.ranks import ranges

Phase = Literal["start", "data", "forward", "backward", "sync", "update", "record", "evaluation", "checkpoint"]
"""Phase of a step.

``sync``: the rank waits for other ranks, for gradients or anything else. On a GPU the phases are those of the
CPU thread, which runs ahead and seldom waits.
"""

_PLACES = 3  # positions that a message lists before it counts the rest


@dataclass(frozen=True)
class Heartbeat:
    """Last known position of a rank."""

    host: str
    step: int
    """Step, counted from 1; 0 before the first."""
    phase: Phase
    for_s: float = 0.0
    """Seconds since the position last changed."""
    beat: int = 0
    """The number of times that the rank has published its position, so that no two of its heartbeats are equal."""
    ended: bool = False
    """True if the rank has ended in order."""


class Here:
    """Position of this process, written by the training thread and read by the watchdog thread."""

    def __init__(self) -> None:
        """Start before the first step, in phase "start"."""
        self.at: tuple[int, Phase] = (0, "start")
        """Step and phase: a new object at every move, even to the same position, as from batch to batch."""
        self.fresh = True
        """True if something runs for the first time, and so may compile or connect.

        It is set when a phase is first entered, or first with images of a shape, and cleared at the next step.
        """
        self._known: set[object] = set()

    def enter(self, phase: Phase, step: int | None = None, shape: Sequence[int] = ()) -> None:
        """Record that the rank is now in ``phase``, of ``step`` if given, with images of ``shape`` if that matters."""
        if step is None:
            step = self.at[0]
        elif step != self.at[0]:
            self.fresh = False
        if (phase, shape) not in self._known:
            self._known.add((phase, shape))
            self.fresh = True
        self.at = (step, phase)

    def move(self) -> None:
        """Record that the rank makes progress in its phase: what takes long is no hang."""
        self.enter(self.at[1])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the block as waiting for other ranks."""
        before = self.at[1]
        self.enter("sync")
        yield
        self.enter(before)  # not after an error: "sync" is where the rank ended


here = Here()
"""Position of this process, which is one rank."""


def publish(board: Board, rank: int, heartbeat: Heartbeat, file: Path | None = None) -> None:
    """Publish a position on ``board`` for other ranks, and in ``file``, if given, for this node's launcher."""
    position = asdict(heartbeat)
    if file is not None:
        with suppress(OSError):  # the launcher has ended
            atomic_write_text(file, json.dumps(position), shared=True)
    board.post(f"heartbeat/{rank}", position)


def published(board: Board, ranks: Sequence[int]) -> dict[int, Heartbeat]:
    """Return the published positions of ``ranks``, without the ranks that have published none."""
    return {rank: Heartbeat(**position) for rank, position in board.gather("heartbeat", ranks).items()}


def describe_exit(rank: int, fate: str, file: Path) -> str:
    """Describe how ``rank`` of this node ended, and its last position, which it has published in ``file``."""
    if not file.is_file():
        return f"rank {rank} {fate}"
    last = Heartbeat(**json.loads(file.read_text(encoding="utf-8")))
    return f"rank {rank} on {last.host} {fate} {_where(last)}"


def describe_lost(lost: Sequence[int], known: Mapping[int, Heartbeat]) -> str:
    """Describe in one sentence the last positions of the ``lost`` ranks, and what the others did meanwhile."""
    unheard = [rank for rank in lost if rank not in known]
    heard = {rank: known[rank] for rank in lost if rank in known}
    said = [_listed(heard, lambda last: f" on {last.host} stopped answering {_where(last)}")] if heard else []
    if unheard:
        said.append(f"rank {ranges(unheard)} never answered")
    return "; ".join([", ".join(said), *_others(known, lost)])


def describe_hang(known: Mapping[int, Heartbeat], setting: str) -> str:
    """Describe in one sentence which ranks keep the others waiting, if all answer and one makes no progress.

    These are the ranks that are furthest behind and do not themselves wait for others.

    Args:
        known: Positions of the ranks.
        setting: Name of the time limit that was exceeded.
    """
    behind = {rank: at for rank, at in known.items() if at.step == min(at.step for at in known.values())}
    culprits = {rank: at for rank, at in behind.items() if at.phase != "sync"}
    reason = f"longer than {setting} allows"
    if not culprits:
        waited_s, places = max(at.for_s for at in known.values()), _listed(known, lambda at: f" {_where(at)}")
        return f"all ranks have waited for each other for {waited_s:.0f} s, {reason}: {places}"
    said = _listed(culprits, lambda at: f" on {at.host} has been {_where(at)} for {at.for_s:.0f} s")
    return "; ".join([f"{said}, {reason}", *_others(known, list(culprits))])


def _others(known: Mapping[int, Heartbeat], named: Sequence[int]) -> list[str]:
    rest = {rank: at for rank, at in known.items() if rank not in named}
    waiting = {rank: at for rank, at in rest.items() if at.phase == "sync"}
    busy = {rank: at for rank, at in rest.items() if at.phase != "sync"}
    waited = []
    if waiting:
        longest = max(at.for_s for at in waiting.values())
        who = "all others" if len(waiting) == len(rest) > _PLACES else f"rank {ranges(list(waiting))}"
        waited = [f"{who} waited in sync" + (f" for {longest:.0f} s" if longest >= 1 else "")]
    return waited + ([_listed(busy, lambda at: f" was {_where(at)}")] if busy else [])


def _listed(ranks: Mapping[int, Heartbeat], what: Callable[[Heartbeat], str]) -> str:
    """Name ranks with equal texts together, with the seconds of the one that was there longest; count what is left."""
    alike: dict[str, list[int]] = {}
    for rank, at in sorted(ranks.items()):
        alike.setdefault(what(replace(at, for_s=0.0)), []).append(rank)
    groups = list(alike.values())
    longest = [max((ranks[rank] for rank in same), key=lambda at: at.for_s) for same in groups[:_PLACES]]
    pieces = [f"rank {ranges(same)}{what(at)}" for same, at in zip(groups, longest, strict=False)]
    more = len(groups) - _PLACES
    return ", ".join(pieces) + (f", and {more} more such" if more > 0 else "")


def _where(at: Heartbeat) -> str:
    if at.step:
        return f"in {at.phase} at step {at.step}"
    return "before the first step" if at.phase == "start" else f"in {at.phase}"
