"""Where each rank is: in which step, in which phase of it, for how long; and what of that is said at an end.

The thread that trains says where it is by a write to memory, some hundred nanoseconds. What other ranks, and the
launcher, know of it is published by a thread beside it (:mod:`imagenet_fast.distributed.watchdog`), so that a rank that
was killed or stopped has left where it was last.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.presence import absent
from imagenet_fast.distributed.rank_info import ranges

Phase = Literal["start", "data", "forward", "backward", "sync", "update", "record", "evaluation", "checkpoint"]
"""``sync``: it waits for other ranks, for gradients or anything else. On a GPU phases are those of the host, which runs
ahead and seldom waits."""

_PLACES = 3  # that a sentence names one by one, before it counts


@dataclass(frozen=True)
class Heartbeat:
    """What a rank does, as it was last heard of."""

    host: str
    step: int
    """Counted from 1; 0 before the first."""
    phase: Phase
    for_s: float = 0.0
    """How long it had not moved from there."""
    steps: int = 0
    """How many it had reported by :meth:`Here.took`."""
    own_s: float = 0.0
    """Seconds in them without waiting for other ranks."""


class Here:
    """Where this process is. The thread that trains writes it, one that watches reads it."""

    def __init__(self) -> None:
        self.at: tuple[int, Phase] = (0, "start")
        """Step and phase: a new object at every move, also to the same place, as from batch to batch."""
        self.fresh = True
        """Whether something is under way for the first time, which may compile or connect: from the first time that a
        phase is entered until the next step."""
        self.pace = (0, 0.0)
        """Steps that have been reported, and the seconds of its own that this rank took for them."""
        self._known: set[Phase] = set()

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """The rank is now in ``phase``; of another ``step``, where one is given."""
        if step is None:
            step = self.at[0]
        elif step != self.at[0]:
            self.fresh = False
        if phase not in self._known:
            self._known.add(phase)
            self.fresh = True
        self.at = (step, phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others."""
        before = self.at[1]
        self.enter("sync")
        yield
        self.enter(before)  # not after an error: it is there that the rank has ended

    def took(self, steps: int, own_s: float) -> None:
        """So many more steps took this rank ``own_s`` seconds, without those that it waited for others."""
        self.pace = (self.pace[0] + steps, self.pace[1] + own_s)


here = Here()
"""Of this process, which is one rank."""


def publish(store: Store, rank: int, whereabouts: Heartbeat, folder: Path | None = None) -> None:
    """For other ranks; and in ``folder`` for whoever started the ranks of this machine."""
    text = json.dumps(asdict(whereabouts))
    if folder is not None:
        partial = folder / f".whereabouts.{uuid.uuid4().hex}.json"
        with suppress(OSError):  # whoever started them has ended
            partial.write_text(text, encoding="utf-8")
            partial.replace(_file(folder, rank))
    store.set(f"whereabouts/{rank}", text)


def published(store: Store, ranks: Sequence[int]) -> dict[int, Heartbeat]:
    """Where those of ``ranks`` were last that have said so; two requests where all have."""
    missing = set(absent(store, "whereabouts", ranks))
    there = [rank for rank in ranks if rank not in missing]
    texts = store.multi_get([f"whereabouts/{rank}" for rank in there]) if there else []
    return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}


def describe_exit(rank: int, fate: str, folder: Path) -> str:
    """What became of a ``rank`` of this machine, and where it was last by what it has left in ``folder``."""
    file = _file(folder, rank)
    if not file.is_file():
        return f"rank {rank} {fate}"
    last = Heartbeat(**json.loads(file.read_text(encoding="utf-8")))
    return f"rank {rank} on {last.host} {fate} {_where(last)}"


def describe_lost(lost: Sequence[int], known: Mapping[int, Heartbeat]) -> str:
    """In a sentence, where the ``lost`` ranks were when they were last heard of, and what the others did meanwhile."""
    unheard = [rank for rank in lost if rank not in known]
    heard = {rank: known[rank] for rank in lost if rank in known}
    said = _listed(heard, lambda last: f" on {last.host}", lambda last: f" stopped answering {_where(last)}")
    if unheard:
        said.append(f"rank {ranges(unheard)} never answered")
    return "; ".join([_first(said), *_others(known, lost)])


def describe_hang(known: Mapping[int, Heartbeat], setting: str) -> str:
    """In a sentence, which rank keeps the others waiting, where all of them answer and one has not moved for longer
    than ``setting`` allows.

    Those that are furthest behind do; of these the ones that do not wait themselves.
    """
    behind = {rank: at for rank, at in known.items() if at.step == min(at.step for at in known.values())}
    culprits = {rank: at for rank, at in behind.items() if at.phase != "sync"}
    reason = f"longer than {setting} allows"
    if not culprits:
        waited_s, one = max(at.for_s for at in known.values()), next(iter(known.values()))
        if len({(at.step, at.phase) for at in known.values()}) == 1:
            return f"all {len(known)} ranks have waited for each other {_where(one)} for {waited_s:.0f} s, {reason}"
        places = _listed(known, _nowhere, lambda at: f" {_where(at)}")
        return f"all ranks have waited for each other for {waited_s:.0f} s, {reason}: {_first(places)}"
    said = _listed(culprits, lambda at: f" on {at.host}", lambda at: f" has been {_doing(at)} for {at.for_s:.0f} s")
    return "; ".join([f"{_first(said)}, {reason}", *_others(known, list(culprits))])


def _others(known: Mapping[int, Heartbeat], named: Sequence[int]) -> list[str]:
    """What all but the ``named`` ranks did, if there are any."""
    rest = {rank: at for rank, at in known.items() if rank not in named}
    waiting = {rank: at for rank, at in rest.items() if at.phase == "sync"}
    busy = {rank: at for rank, at in rest.items() if at.phase != "sync"}
    waited = []
    if waiting:
        longest = max(at.for_s for at in waiting.values())
        who = "all others" if len(waiting) == len(rest) > _PLACES else f"rank {ranges(list(waiting))}"
        waited = [f"{who} waited in sync" + (f" for {longest:.0f} s" if longest >= 1 else "")]
    said = _listed(busy, _nowhere, lambda at: f" was {_doing(at)}")
    return waited + ([_first(said)] if said else [])


def _listed(
    ranks: Mapping[int, Heartbeat], host: Callable[[Heartbeat], str], what: Callable[[Heartbeat], str]
) -> list[str]:
    """One piece for all ranks of which the same is to be said; seconds are those of the first that moved least."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, at in sorted(ranks.items()):
        alike.setdefault((host(at), what(replace(at, for_s=0.0))), []).append(rank)
    pieces = []
    for (where, _), same in alike.items():
        longest = max((ranks[rank] for rank in same), key=lambda at: at.for_s)
        pieces.append(f"rank {ranges(same)}{where}{what(longest)}")
    return pieces


def _first(pieces: list[str]) -> str:
    more = len(pieces) - _PLACES
    return ", ".join(pieces[:_PLACES]) + (f", and {more} more such" if more > 0 else "")


def _where(at: Heartbeat) -> str:
    if at.step:
        return f"at step {at.step}, in {at.phase}"
    match at.phase:
        case "start":
            return "before the first step"
        case "evaluation":  # perhaps all there is to be done
            return "in evaluation"
        case _:
            return f"before the first step, in {at.phase}"


def _doing(at: Heartbeat) -> str:
    if at.step:
        return f"in {at.phase} at step {at.step}"
    return "starting" if at.phase == "start" else f"in {at.phase}"


def _nowhere(at: Heartbeat) -> str:
    return ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"whereabouts-{rank}.json"
