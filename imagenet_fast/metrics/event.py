"""Events and their fan-out."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from imagenet_fast.errors import UserError, warn


@dataclass(frozen=True)
class Event:
    """Something measured. Value ``v`` of event ``name`` has the tag ``name/v``, which carries its unit."""

    name: str
    step: int
    run_s: float
    values: dict[str, Any]

    def tagged(self) -> dict[str, Any]:
        return {f"{self.name}/{key}": value for key, value in self.values.items()}


class Sink(Protocol):
    """Somewhere events go."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


class MetricLogger:
    """Stamps values with the run's time and hands them to every sink; without sinks (on all ranks but 0) to none.

    Of a full disk it warns: sinks write later what they could not. Raises UserError where one cannot be written
    otherwise.

    >>> record("train", step, loss=2.3, lr=0.1)
    """

    def __init__(self, run_s: Callable[[], float], sinks: Sequence[Sink] = ()) -> None:
        self._run_s = run_s
        self._sinks = sinks
        self._is_full = False

    def __call__(self, name: str, step: int, **values: Any) -> None:
        event = Event(name, step, self._run_s(), values)
        full = False
        for sink in self._sinks:
            try:
                sink.write(event)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise UserError(
                        f"the run cannot be recorded ({error.strerror or error}); see to the disk of its directory, "
                        "then go on by --resume auto"
                    ) from None
                full = True
        if full and not self._is_full:
            warn("the run's directory is on a full disk; free space there, and what happens meanwhile is recorded then")
        self._is_full = full

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
