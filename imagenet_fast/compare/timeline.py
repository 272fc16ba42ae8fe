"""Draw one step of each trace on a common time axis: computation, messages on the wire, and waits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import Row, column, legend_below, new_figure, plot_label
from imagenet_fast.run.run_dir import RunDir

_FORWARD, _BACKWARD, _MESSAGE, _WAIT = "#a9bfe0", "#4c72b0", "#6b6b6b", "#dd8452"  # differ in lightness, too
_WIDTH, _LANES = 9.0, 7.9  # inches of the figure, and about that of its lanes
_LETTER = 0.062  # inches of a letter of a label


@dataclass(frozen=True)
class Stretch:
    """A stretch of a step: a layer's computation, a message or a wait."""

    name: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class StepTimeline(Row):
    """One step of a trace, from the beginning of backward to the end of the next forward.

    Times are in milliseconds; those of compute, waits and the wire are covered by at least one layer, wait or message.
    """

    label: str = field(metadata=column("trace"))
    """Name of the run or file."""
    step_ms: float = field(metadata=column("step ms", form=".0f"))
    """Length of the step."""
    compute_ms: float = field(metadata=column("compute", form=".0f"))
    """Time in backward and forward."""
    wait_ms: float = field(metadata=column("wait", form=".0f"))
    """Time in waits."""
    wire_ms: float = field(metadata=column("wire busy", form=".0f"))
    """Time with a message under way."""
    sent: int = field(metadata=column("messages"))
    """Number of messages."""
    backward: tuple[Stretch, ...]
    """Layers of the backward pass."""
    forward: tuple[Stretch, ...]
    """Layers of the next forward pass."""
    messages: tuple[Stretch, ...]
    """Messages on the wire."""
    waits: tuple[Stretch, ...]
    """Waits for messages."""


def read_timeline(trace: Path) -> StepTimeline:
    """Read the step of median length from a trace.

    Args:
        trace: A run directory with a ``trace.json``, or the file itself.

    Raises:
        UserError: There is no such file, it is no trace, or it holds no whole step or no message.
    """
    file = RunDir(trace).trace if trace.is_dir() else trace
    if not file.is_file():
        raise UserError(f"there is no {file}; write it by `train --trace` or `bench sync --trace DIR`")
    try:
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {track: list(_stretches(events, track)) for track in ("compute", "wire", "wait")}
        marks = [(str(event["name"]), event["ts"] / 1e3) for event in events if event["ph"] == "i"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} is no trace of ours, or is damaged; write it again by `train --trace` or `bench sync --trace DIR`"
        ) from None
    steps = sorted(_steps(marks), key=lambda step: step[1] - step[0])
    if not steps:
        raise UserError(f"{file} holds no whole step; write it again by `train --trace`, and train 15 steps or more")
    begin, end = steps[(len(steps) - 1) // 2]
    backward, forward = (_within(tracks["compute"], begin, end, way) for way in ("backward ", "forward "))
    messages, waits = _within(tracks["wire"], begin, end), _within(tracks["wait"], begin, end, "wait ")
    if not messages:
        raise UserError(f"{file} holds no message: one rank has nothing to send; trace two ranks or more")
    label = file.parent.resolve().name if file == RunDir(file.parent).trace else file.stem
    return StepTimeline(
        label, end - begin, covered_ms([*backward, *forward]), covered_ms(waits), covered_ms(messages), len(messages),
        backward, forward, messages, waits,
    )  # fmt: skip


def _within(stretches: Iterable[Stretch], begin_ms: float, end_ms: float, prefix: str = "") -> tuple[Stretch, ...]:
    """Return what lies between two moments, timed from the first, of stretches whose names begin with ``prefix``."""
    return tuple(
        Stretch(
            one.name.removeprefix(prefix).removeprefix("for "),
            max(one.begin_ms, begin_ms) - begin_ms,
            min(one.end_ms, end_ms) - begin_ms,
        )
        for one in stretches
        if one.name.startswith(prefix) and one.begin_ms < end_ms and one.end_ms > begin_ms
    )


def _stretches(events: Sequence[dict[str, Any]], track: str) -> Iterator[Stretch]:
    """Yield the stretches of a track by their beginning."""
    own = [event for event in events if event["ph"] == "X" and event["cat"] == track]
    for event in sorted(own, key=itemgetter("ts")):
        yield Stretch(str(event["name"]), event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)


def _steps(marks: Sequence[tuple[str, float]]) -> Iterator[tuple[float, float]]:
    """Yield the begin and the end of each step. It begins when the last forward before its backward ends."""
    begins, turn = [], None
    for name, moment in sorted(marks, key=itemgetter(1)):
        if name == "forward ends":
            turn = moment
        elif turn is not None:
            begins.append(turn)
    yield from pairwise(begins)


def _joined(stretches: Iterable[Stretch], gap_ms: float) -> list[Stretch]:
    """Join neighbours of one name that are at most ``gap_ms`` apart, such as a layer's weight and bias."""
    joined: list[Stretch] = []
    for one in stretches:
        if joined and one.name == joined[-1].name and one.begin_ms - joined[-1].end_ms <= gap_ms:
            joined[-1] = Stretch(one.name, joined[-1].begin_ms, one.end_ms)
        else:
            joined.append(one)
    return joined


def arrivals(messages: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield what the wire carries in one row: at each moment, of the messages under way the one that arrives first."""
    moments = sorted({moment for one in messages for moment in (one.begin_ms, one.end_ms)})
    for begin, end in pairwise(moments):
        under_way = [one for one in messages if one.begin_ms <= begin and one.end_ms >= end]
        if under_way:
            yield Stretch(min(under_way, key=attrgetter("end_ms")).name, begin, end)


def covered_ms(stretches: Iterable[Stretch]) -> float:
    """Return the time that at least one of the stretches covers."""
    total, until = 0.0, 0.0
    for one in sorted(stretches, key=attrgetter("begin_ms")):
        total += max(0.0, one.end_ms - max(one.begin_ms, until))
        until = max(until, one.end_ms)
    return total


def draw_timelines(steps: Sequence[StepTimeline], png: Path, until_ms: float | None = None) -> None:
    """Draw a panel of three lanes for each step, all on one time axis.

    Args:
        steps: The steps, from top to bottom.
        png: The file to write.
        until_ms: End of the time axis; None: that of the longest step.
    """
    figure = new_figure(_WIDTH, 0.75 + 1.25 * len(steps))
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    end = until_ms or 1.02 * max(step.step_ms for step in steps)
    for step, axes in zip(steps, panels, strict=True):
        _draw_lanes(step, axes, _LANES / end)
    panels[0].set_xlim(0, end)
    panels[-1].set_xlabel("ms since backward began", fontsize=8)
    legend_below(figure, 4)
    figure.savefig(png)


def _draw_lanes(step: StepTimeline, axes: Any, inches_per_ms: float) -> None:
    """Draw the lanes of a step; a name is left out where it does not fit."""
    axes.axvspan(0, step.step_ms, color="#f3f3f3", linewidth=0)
    axes.axvline(step.step_ms, color="black", linewidth=1)

    def bars(row: int, stretches: Iterable[Stretch], colour: str, label: str, ink: str = "black") -> None:
        joined = _joined(stretches, step.step_ms / 300)
        spans = [(one.begin_ms, one.end_ms - one.begin_ms) for one in joined]
        axes.broken_barh(spans, (row, 0.9), facecolor=colour, edgecolor="white", linewidth=0.4, label=label)
        for one in joined:
            if inches_per_ms * (one.end_ms - one.begin_ms) > _LETTER * len(one.name) + 0.04:
                middle = ((one.begin_ms + one.end_ms) / 2, row + 0.45)
                axes.text(*middle, one.name, color=ink, fontsize=7, ha="center", va="center", clip_on=True)

    bars(0, step.backward, _BACKWARD, "backward", "white")
    bars(0, step.forward, _FORWARD, "next forward")
    bars(1, arrivals(step.messages), _MESSAGE, "message", "white")
    bars(2, step.waits, _WAIT, "wait")
    axes.set_yticks([0.45, 1.45, 2.45], ["compute", "wire", "wait"], fontsize=8)
    axes.set_ylim(2.95, -0.05)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines["left"].set_visible(False)
    axes.set_title(f"{plot_label(step.label)}: {step.step_ms:.0f} ms, of which {step.wait_ms:.0f} ms waits", loc="left")
