"""The picture of a step: what is in it, how long, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.compare.timeline import Stretch, arrivals, covered_ms, read_timeline
from tests.e2e.command import in_process

STEPS = 4
COURSE = {
    "compute": [("backward 1", 0, 30), ("backward 0", 30, 60), ("backward 0", 60, 61), ("forward 0", 70, 80)],
    "wire": [("1", 30, 68), ("0", 61, 69)],
    "wait": [("wait for 1", 61, 68), ("wait for 0", 68, 69)],
}
"""A step by track: names, begins and ends in ms since backward began; it lasts 100 ms."""


def trace(steps: int = STEPS, lasting: Sequence[float] = (100,) * STEPS, without: str = "") -> dict[str, Any]:
    """A trace of steps like ``COURSE``, of which step n lasts ``lasting[n]`` ms."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "compute"}}]
    begun = 7.0
    for ms in lasting[:steps]:
        for track, stretches in COURSE.items():
            for name, begin, end in stretches if track != without else ():
                place = {"ts": 1e3 * (begun + begin), "dur": 1e3 * (end - begin)}
                events.append({"ph": "X", "pid": 0, "tid": 0, "name": name, "cat": track, "args": {}} | place)
        for name, moment in (("forward ends", begun), ("step ends", begun + 69)):
            events.append({"ph": "i", "s": "p", "pid": 0, "tid": 0, "name": name, "cat": "mark", "ts": 1e3 * moment})
        begun += ms
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def written(file: Path, content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def test_a_step_begins_with_backward_and_ends_with_the_next_forward(tmp_path: Path):
    step = read_timeline(written(tmp_path / "lazy.json", trace()))
    assert step.label == "lazy"
    times = (step.step_ms, step.compute_ms, step.wait_ms, step.wire_ms, step.sent)
    assert times == pytest.approx((100, 71, 8, 39, 2))
    shown = {"compute": [*step.backward, *step.forward], "wire": step.messages, "wait": step.waits}
    for track, stretches in shown.items():
        told = [(name.split()[-1], begin, end) for name, begin, end in COURSE[track]]
        assert [(s.name, round(s.begin_ms, 6), round(s.end_ms, 6)) for s in stretches] == told


def test_the_step_of_median_length_is_taken_and_a_run_has_its_directory_s_name(tmp_path: Path):
    content = trace(lasting=(100, 130, 90, 100))  # the last one is not whole
    written(tmp_path / "runs" / "a" / "trace.json", content)
    step = read_timeline(tmp_path / "runs" / "a")
    assert (step.label, round(step.step_ms)) == ("a", 100)


def test_with_micro_batches_a_step_begins_at_the_backward_that_sends(tmp_path: Path):
    content = trace()
    extra = [{"ph": "i", "name": "forward ends", "ts": 1e3 * (7 + 100 * n + 85)} for n in range(STEPS)]
    content["traceEvents"] += extra  # a forward after the step's end, whose backward only accumulates
    step = read_timeline(written(tmp_path / "t.json", content))
    assert (step.step_ms, step.backward[0].begin_ms) == pytest.approx((100, 0))


def test_the_wire_shows_what_arrives_next():
    messages = [Stretch("long", 0, 100), Stretch("short", 10, 20), Stretch("last", 90, 120)]
    row = [(one.name, one.begin_ms, one.end_ms) for one in arrivals(messages)]
    assert row == [("long", 0, 10), ("short", 10, 20), ("long", 20, 90), ("long", 90, 100), ("last", 100, 120)]


def test_covered_time_is_that_of_a_count_by_milliseconds():
    draw = random.Random(0)
    for _ in range(50):
        begins = [draw.randrange(90) for _ in range(draw.randrange(8))]
        stretches = [Stretch("", begin, begin + draw.randrange(10)) for begin in begins]
        count = sum(any(s.begin_ms <= ms < s.end_ms for s in stretches) for ms in range(100))
        assert covered_ms(stretches) == covered_ms(arrivals(stretches)) == count


def test_steps_are_shown_and_drawn(tmp_path: Path):
    file, png = written(tmp_path / "lazy.json", trace()), tmp_path / "two.png"
    printed = in_process("timeline", str(file), str(file), "--png", str(png), "--until", "200")
    assert [line.split() for line in printed.splitlines()[1:3]] == [["lazy", "100", "71", "8", "39", "2"]] * 2
    assert "drawn to" in printed
    colours = {tuple(pixel) for row in np.asarray(Image.open(png).convert("RGB")).tolist() for pixel in row}
    assert {tuple(bytes.fromhex(code)) for code in ("4c72b0", "a9bfe0", "6b6b6b", "dd8452")} <= colours


def test_what_is_no_trace_and_a_wrong_name_are_refused(tmp_path: Path, refusal: Callable[..., str]):
    run, file = str(tmp_path), tmp_path / "trace.json"
    assert f"there is no {file}" in refusal("timeline", run)
    for content, said in (
        ([], "is no trace of ours, or is damaged"),
        ({"traceEvents": [{"ph": "X"}]}, "or is damaged"),
        ({"traceEvents": [{"ph": "i", "name": "step ends", "ts": "soon"}]}, "is damaged"),
        ({"traceEvents": []}, "holds no whole step"),
        (trace(steps=1), "holds no whole step"),
        (trace(without="wire"), "holds no message"),
    ):
        sentence = refusal("timeline", str(written(file, content).parent))
        assert said in sentence
        assert str(file) in sentence
    assert "does not end in .png" in refusal("timeline", str(written(file, trace())), "--png", f"{tmp_path}/a.svg")
    file.write_text(file.read_text()[:200])
    assert "is damaged" in refusal("timeline", run)
