"""What is read from the records of several runs, and shown side by side."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.compare.report import distinct_names, draw_curves
from imagenet_fast.metrics.past_run import PastRun, read_run
from imagenet_fast.metrics.tables import new_figure, plot_label
from tests.e2e.command import in_process
from tests.metrics.past import leave_run, outcome, shown, strict


def test_a_report_needs_only_what_was_recorded_if_anything(tmp_path: Path):
    leave_run(tmp_path, wait_s=4.5)
    runs = [replace(read_run(tmp_path), name="tp4"), PastRun(tmp_path / "dp4", [], "failed", "dp4")]
    headings, first, second = shown(runs).splitlines()
    assert re.split("  +", headings) == [
        "run", "status", "top-1 %", "loss", "target s", "steps", "s/step", "img/s", "wait %", "MB/step"
    ]  # fmt: skip
    assert first.split() == ["tp4", "reached", "76.00", "1.5000", "140.0", "800", "0.160", "21333", "7.5", "89.50"]
    assert second.split() == ["dp4", "failed", *"––––––––"]
    for several in (runs, runs[1:]):
        draw_curves(several, tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("launchers", "status"), [(False, "not ended"), (True, "failed")])
def test_a_run_whose_rank_0_was_killed_is_reported_by_its_events(launchers: bool, status: str, tmp_path: Path):
    """Also where the launcher has left an outcome, which knows of no step, and where a line is half written."""
    leave_run(tmp_path)
    events = tmp_path / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]) + '{"event": "tra')
    (tmp_path / "outcome.json").unlink()
    if launchers:
        outcome().write(tmp_path)
    row = shown([read_run(tmp_path)]).splitlines()[-1]
    told = ["76.00", "1.5000", "800", "0.160", "89.50"]
    assert row.split() == ["resnet50-8gpu", "lazy", "dp8", *status.split(), *told]


def test_report_step_time_skips_ten_and_weighs_intervals():
    events: list[dict[str, Any]] = [{"event": "run", "global_batch": 10}]
    for step, rate, link_MB in ((4, 1.0, 9.0), (8, 1.0, 9.0), (11, 2.0, 9.0), (14, 5.0, 3.0), (15, 10.0, 7.0)):
        events.append({"event": "speed", "step": step, "images_per_s": rate})
        events.append({"event": "sync", "step": step, "sent_MB": link_MB - 1, "link_MB": link_MB})
    run, begun = (PastRun(Path(), some, "not ended", "tp4") for some in (events, events[:5]))
    assert run.step_s == 2.0
    rows = [shown([one]).splitlines()[-1].split()[3:] for one in (run, begun)]
    assert rows == [["15", "2.000", "3.00", "4.00"], ["8", "8.00"]], "the second has not settled"


def two_runs(tmp_path: Path, *folders: Path | str) -> list[PastRun]:
    """Of one recipe, and so of one name, in these folders."""
    for folder in folders:
        leave_run(tmp_path / folder)
    return [read_run(tmp_path / folder) for folder in folders]


def test_equal_run_names_get_distinct_labels_and_a_run_given_twice_is_there_once(tmp_path: Path):
    folders = [tmp_path / name for name in ("run", "x/run")]
    runs = [*two_runs(tmp_path, *folders), PastRun(tmp_path / "lone", [], "failed", "lone")]
    assert distinct_names(runs) == [*(f"resnet50-8gpu lazy dp8 ({folder})" for folder in folders), "lone"]
    assert in_process("report", *map(str, folders), f"{tmp_path}/x/../run/").count("reached") == 2


@pytest.mark.filterwarnings("error")
def test_labels_are_shown_as_they_are(tmp_path: Path):
    labels = ["a [red]b[/]", "c:100:d", "b$x_{$y", "_draft"]
    evaluated = {"event": "eval", "step": 1, "run_s": 60.0, "top1": 92.0}
    runs = [PastRun(tmp_path, [evaluated], "reached", label) for label in labels]
    assert [label for label in labels if label not in shown(runs)] == []
    draw_curves(runs, tmp_path / "curve.png")
    axes = new_figure(10, 4).subplots()
    for label in labels:
        axes.plot([1], [1], label=plot_label(label))
    assert [text.get_text().strip().replace("\\$", "$") for text in axes.legend().get_texts()] == labels


def test_narrow_terminals_wrap_columns_and_cut_no_number(tmp_path: Path):
    runs = [*two_runs(tmp_path, "one", "a-long-name"), PastRun(tmp_path, [], "failed", "hybrid-pp2dp2tp2-seed12345")]
    assert shown([replace(runs[0], name="demo lazy dp2 (runs/slower)")], width=80).count("run ") == 1, "in one piece"
    for width in (200, 120, 100, 80, 60, 50, 40, 30, 24):
        text = shown(runs, width=width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        for value in ("reached", "76.00", "1.5000", "140.0", "800", "0.160", "21333", "89.50"):
            assert text.split().count(value) == 2, text
        for heading in ("top-1 %", "loss", "target s", "s/step", "img/s", "MB/step"):
            assert heading in text, text


@pytest.mark.parametrize("name", ["top1_mirror", "top1_shift"])
def test_the_image_shows_the_accuracy_that_the_target_is_for(tmp_path: Path, monkeypatch, name: str):
    begun = {"event": "run", "target_top1": 93.0, "target_mirrored": True}
    events = [begun, {"event": "eval", "run_s": 60.0, "top1": 92.0, name: 93.4}]
    figure = new_figure(10, 4)
    monkeypatch.setattr("imagenet_fast.compare.report.new_figure", lambda *_: figure)
    draw_curves([PastRun(tmp_path, events, "reached", "run")], tmp_path / "curve.png")
    plain, mean = (line for line in figure.axes[0].lines if len(line.get_xdata()) == 1)
    assert (plain.get_ydata()[0], mean.get_ydata()[0]) == (92.0, 93.4)


def test_a_diverged_run_is_recorded_in_strict_json_and_drawn_with_a_gap(tmp_path: Path):
    leave_run(tmp_path, losses=(2.5, math.nan), last_top1=math.nan)
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        strict(line)
    assert strict((tmp_path / "outcome.json").read_text())["top1"] is None
    run = read_run(tmp_path)
    assert str(run.curve("train", "loss")[1]) == "[2.5, nan]"
    headings, row = shown([run]).splitlines()
    assert re.split("  +", headings) == ["run", "status", "steps", "s/step", "img/s", "MB/step"], "of what was finite"
    assert row.split() == ["resnet50-8gpu", "lazy", "dp8", "failed", "800", "0.160", "21333", "89.50"], "no wait"
    draw_curves([run], tmp_path / "curve.png")
