"""Keep the first tier quick: its tests declare that they start processes, and one that takes long is told of."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests import ranks

LIMIT_S = 2.0
"""Seconds of a processor from which a test of the first tier is told of."""

STARTED = "imagenet_fast.started"
"""Audited by what forks the command line from the fork server, of which Python itself audits nothing."""

_IMPORT_S = 0.005  # for a module, which the first test that needs it imports
_STARTING = {STARTED, "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"}


@dataclass
class Cost:
    """What a test has taken so far."""

    started: list[str] = field(default_factory=list)
    """The processes that it started."""
    modules: int = field(default_factory=lambda: len(sys.modules))
    begun_s: float = field(default_factory=lambda: _used_s())

    @property
    def cpu_s(self) -> float:
        """Processor time of this process and its ranks; not that of imports, nor of processes, which are declared."""
        return _used_s() - self.begun_s - _IMPORT_S * (len(sys.modules) - self.modules)

    def objection(self, fixtures: Collection[str]) -> str:
        """Why the first tier can't have this test, with these fixtures, or nothing."""
        if self.started and not {"subprocesses", "root"}.intersection(fixtures):
            return f"it starts {self.started[0]} and does not ask for `subprocesses`"
        return ""

    def doubt(self) -> str:
        """Why the first tier is slower for this test, or nothing; a busy machine, too, may make it slow."""
        took_s = self.cpu_s
        return f"it took {took_s:.1f} s of a processor; mark it `ci`, or make it smaller" if took_s > LIMIT_S else ""


_current: Cost | None = None


@contextmanager
def counting() -> Iterator[Cost]:
    """Count what this process does in the block."""
    global _current
    outer, _current = _current, Cost()
    try:
        yield _current
    finally:
        _current = outer


def _used_s() -> float:
    return time.process_time() + ranks.cpu_s


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event in _STARTING and _current is not None:
        _current.started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_hear)
