"""Tell which accesses of streams nothing orders, from vector clocks and a shadow of every byte.

As torch's CUDA sanitizer does (``torch/cuda/_sanitizer.py``), but by byte: views of one gradient buffer overlap, and
most of them do not. And memory that was freed is looked at when its stream is given memory again, as the caching
allocator would give out the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
from numpy.typing import NDArray

HOST = 0
"""The host's clock, as if it were a stream: it runs ahead of all others until it waits for them."""
MOST_STREAMS = 256

Positions = slice | NDArray[np.int64]
"""Bytes of a block of memory."""


@dataclass(frozen=True)
class Access:
    """What an operation reads or writes of a block."""

    block: int
    positions: Positions
    writes: bool


@dataclass(frozen=True)
class Moment:
    """When something happens on a stream."""

    stream: int
    number: int
    """Rising, over all streams, as the host has asked for it."""
    before: NDArray[np.int32]
    """By stream, up to which number everything happens before."""


@dataclass
class _Block:
    stream: int
    """On which it was allocated, and whose next allocation may get it once it is freed."""
    where: Place
    write_moment: NDArray[np.int32]
    write_stream: NDArray[np.int16]
    reads: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """The moment of the last read, by stream."""
    shared_with: set[int] = field(default_factory=set)
    """Streams for which the allocator waits (``Tensor.record_stream``)."""


class RaceDetector:
    """Follows streams, events and memory. ``found`` is what went wrong, in words, each once."""

    def __init__(self, harmless: frozenset[str] = frozenset()) -> None:
        self.found: dict[str, int] = {}
        """How often, by what."""
        self.met: set[str] = set()
        """Of ``harmless``, which have."""
        self._harmless = harmless
        """Functions that may read what others are writing, for they make no use of it."""
        self._moment = 0
        self._clocks: list[NDArray[np.int32]] = []
        self._blocks: dict[int, _Block] = {}
        self._freed: dict[int, list[_Block]] = {}
        self._names: dict[int, tuple[str, Place]] = {}
        self.place: Place | None = None
        """The lines from which operations come in a replay, as they were captured; else they are those of here."""
        self.add_stream()  # the host's

    def add_stream(self) -> int:
        """A new stream. What it is given is ordered behind all that the host has waited for."""
        clock = self._clocks[HOST].copy() if self._clocks else np.zeros(MOST_STREAMS, np.int32)
        self._clocks.append(clock)
        assert len(self._clocks) <= MOST_STREAMS
        return len(self._clocks) - 1

    def moment(self, stream: int) -> NDArray[np.int32]:
        """All that is ordered before what ``stream`` is given next: what an event records."""
        return self._clocks[stream].copy()

    def wait(self, stream: int, moment: NDArray[np.int32]) -> None:
        """``stream`` goes on after ``moment``; for the host, all streams do."""
        for number in range(len(self._clocks)) if stream == HOST else [stream]:
            np.maximum(self._clocks[number], moment, out=self._clocks[number])

    def everything(self) -> NDArray[np.int32]:
        """All that has been launched on any stream."""
        return np.maximum.reduce(self._clocks)

    def forget(self, streams: Sequence[int]) -> None:
        """What these have been given is over."""
        over = np.zeros(MOST_STREAMS, np.int32)
        over[streams] = [self._clocks[stream][stream] for stream in streams]
        self.wait(HOST, over)

    def allocate(self, block: int, size: int, stream: int) -> None:
        """A new block. The memory is there once ``stream`` has come so far; the host's has always been there."""
        for freed in self._freed.pop(stream, []):
            self._check_freed(freed)
        moment = self._tick(stream, "allocation")
        if stream == HOST:
            moment = 0
        moments, streams = np.full(size, moment, np.int32), np.full(size, stream, np.int16)
        self._blocks[block] = _Block(stream, self.place or here(), moments, streams)

    def share(self, block: int, stream: int) -> None:
        """The allocator is told that ``stream`` uses a block."""
        self._blocks[block].shared_with.add(stream)

    def free(self, block: int) -> None:
        """Nobody holds a block any longer."""
        freed = self._blocks.pop(block)
        if freed.stream != HOST:  # of pinned memory the allocator knows by itself who uses it
            self._freed.setdefault(freed.stream, []).append(freed)

    def launch(self, stream: int, name: str, accesses: Sequence[Access]) -> None:
        """An operation on ``stream`` reads and writes memory."""
        clock = self._clocks[stream]
        clock[HOST] = self._clocks[HOST][HOST]  # what the host has done, it did before it came here
        moment = self._tick(stream, name)
        for access in accesses:
            block, at = self._blocks[access.block], access.positions
            self._compare(block.write_moment[at], block.write_stream[at], clock, moment, "written")
            if access.writes:
                for reader, reads in block.reads.items():
                    if reader != stream:
                        self._compare(reads[at], reader, clock, moment, "read")
        for access in accesses:
            block, at = self._blocks[access.block], access.positions
            if access.writes:
                block.write_moment[at] = moment
                block.write_stream[at] = stream
            else:
                if stream not in block.reads:
                    block.reads[stream] = np.zeros(len(block.write_moment), np.int32)
                block.reads[stream][at] = moment

    @property
    def last(self) -> Moment:
        """The last operation or allocation."""
        return self._last

    def report(self, what: str) -> None:
        """Note something else that went wrong."""
        self.found[what] = self.found.get(what, 0) + 1

    def _tick(self, stream: int, name: str) -> int:
        self._moment += 1
        before = self._clocks[stream].copy()
        self._clocks[stream][stream] = self._moment
        self._names[self._moment] = (name, self.place or here())
        self._last = Moment(stream, self._moment, before)
        return self._moment

    def _compare(
        self, moments: NDArray[np.int32], streams: NDArray[np.int16] | int, clock: NDArray[np.int32], now: int, did: str
    ) -> None:
        unordered = moments > clock[streams]
        if unordered.any():
            (by, there), (name, here) = self._names[int(moments[unordered].flat[0])], self._names[now]
            if harmless := self._harmless.intersection(code.co_name for code, _ in (*here, *there)):
                self.met |= harmless
            else:
                told = f"{name} ({_words(here)}) does not wait for {by} ({_words(there)})"
                self.report(f"{told}, which has {did} the same memory")

    def _check_freed(self, block: _Block) -> None:
        clock = self._clocks[block.stream]
        uses = [(reads, np.full(len(reads), stream, np.int16)) for stream, reads in block.reads.items()]
        for moments, streams in [*uses, (block.write_moment, block.write_stream)]:
            late = moments > clock[streams]
            if late.any() and not block.shared_with.issuperset(streams[late]):
                by, there = self._names[int(moments[late].max())]
                told = f"memory allocated at {_words(block.where)} was freed while {by} ({_words(there)})"
                self.report(f"{told} may still use it")


Place = tuple[tuple[CodeType, int], ...]
"""Lines of code, the innermost first."""

_told: dict[str, bool] = {}
"""By file, whether its lines tell where an operation came from."""


def here() -> Place:
    """The innermost lines of the package, or of a test, that have led here."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < 3:
        code = frame.f_code
        if code.co_filename not in _told:
            path = Path(code.co_filename)
            of_test = path.name.startswith("test_") and "tests" in path.parts
            _told[code.co_filename] = "imagenet_fast" in path.parts or of_test
        if _told[code.co_filename]:
            found.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _words(place: Place) -> str:
    return " < ".join(f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in place)
