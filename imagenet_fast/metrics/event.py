"""Events, and how they are passed on to sinks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from imagenet_fast.errors import UserError, warn


@dataclass(frozen=True)
class Event:
    """A set of values measured at one step.

    The tag of value ``v`` of event ``name`` is ``name/v``. The name of a value includes its unit.
    """

    name: str
    step: int
    """Optimizer steps done so far."""
    run_s: float
    """Seconds since the run began."""
    values: dict[str, Any]

    def tagged(self) -> dict[str, Any]:
        """Return the values by tag."""
        return {f"{self.name}/{key}": value for key, value in self.values.items()}


class Sink(Protocol):
    """A consumer of events, such as a file or the console."""

    def write(self, event: Event) -> None:
        """Record one event."""
        ...

    def close(self) -> None:
        """Release the sink's resources."""
        ...


class MetricLogger:
    """Adds the run time to values and passes them on to every sink.

    On ranks other than 0 there are no sinks, and nothing is recorded.

    >>> record("train", step, loss=2.3, lr=0.1)
    """

    def __init__(self, run_s: Callable[[], float], sinks: Sequence[Sink] = ()) -> None:
        """Create a logger.

        Args:
            run_s: Returns the seconds since the run began.
            sinks: Receive every event.
        """
        self._run_s = run_s
        self._sinks = sinks
        self._is_full = False

    def __call__(self, name: str, step: int, **values: Any) -> None:
        """Record one event.

        If the disk is full, print a warning once; sinks write the events later.

        Raises:
            UserError: A sink cannot be written for any other reason.
        """
        event = Event(name, step, self._run_s(), values)
        full = False
        for sink in self._sinks:
            try:
                sink.write(event)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise UserError(
                        f"the run cannot be recorded ({error.strerror or error}); see to the disk of its directory, "
                        "then resume the run"
                    ) from None
                full = True
        if full and not self._is_full:
            warn("the run's directory is on a full disk; free space there, and what happens meanwhile is recorded then")
        self._is_full = full

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()
