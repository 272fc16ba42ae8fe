"""What a run leaves behind, without running one."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from imagenet_fast.bench.plots import draw_curves, new_figure, plot_label
from imagenet_fast.metrics import Accuracy, MetricLogger, RunResult
from imagenet_fast.metrics.console import ConsoleSink
from imagenet_fast.metrics.events import read_events, take_back
from imagenet_fast.metrics.record import open_record
from imagenet_fast.metrics.report import PastRun, distinct_names, read_run, report_table
from imagenet_fast.metrics.run_result import read_outcome
from imagenet_fast.metrics.tables import to_json
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, write_job
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_recipe
from imagenet_fast.training.clock import Clock
from scripts.mllog import mllog_lines
from tests import world
from tests.conftest import Terminal, refusal_of, tables
from tests.corruption import corrupted, with_another_value
from tests.e2e.command import in_process
from tests.training.jobs import job_of

RECIPE = load_recipe(find_recipe("resnet50-8gpu"))


def outcome() -> RunResult:
    return RunResult("failed", "resnet50-8gpu", "lazy", 8, 3200, target_top1=75.9)


def pretend_run(
    record: MetricLogger, result: RunResult, losses: tuple[float, float] = (3.0, 1.5), last_top1: float = 76.0,
    scale: float | None = None, wait_s: float = 0.9,
) -> None:  # fmt: skip
    """The events of a two-epoch run, as train.py sends them; where there is a loss ``scale``, three steps an epoch are
    skipped."""
    record(
        "run", 0, recipe="resnet50-8gpu", sync="lazy", world_size=8, layout="dp8", global_batch=3200, epochs=37,
        steps_per_epoch=400, steps=14800, target_top1=75.9, train_images=1281167, val_images=50000,
        note="recipe written for 8 ranks",
    )  # fmt: skip
    for epoch, loss, top1 in zip((1, 2), losses, (50.0, last_top1), strict=True):
        step = 400 * epoch
        record("epoch", step - 400, epoch=epoch)
        record("data", step, wait_pct=1.5)
        result.add_wait(wait_s, of_s=60.0)
        record("speed", step, images_per_s=20000.0)
        record("sync", step, exposed_ms=2.5, sent_MB=89.5, launches=4.0)
        if scale is not None:
            record("precision", step, loss_scale=scale, skipped_steps=3 * epoch)
        record("train", step, epoch=epoch, loss=loss, lr=1.0)
        result.advance(epoch, step, train_s=60.0 * epoch, sent_bytes=step * 89_500_000)
        result.record_eval(Accuracy(top1=top1, top5=90.0), run_s=70.0 * epoch)
        record("eval", step, epoch=epoch, top1=top1, top5=90.0, images=50000, eval_s=9.0, train_s=60.0 * epoch)
    record("end", result.steps, **vars(result))


def test_the_outcome_follows_the_run_and_stands_for_an_exit_code(tmp_path: Path):
    assert outcome().exit_code == 1
    result = leave_run(tmp_path)
    assert (result.status, result.time_to_accuracy_s, result.exit_code) == ("reached", 140.0, 0)
    assert result.images_per_s == pytest.approx(800 * 3200 / 120)
    assert result.sent_bytes_per_step == 89_500_000
    assert read_outcome(tmp_path) == result
    promised = {
        "status", "top1", "top5", "target_top1", "time_to_accuracy_s", "train_s", "run_s", "epochs", "steps",
        "images_per_s", "sync", "world_size", "global_batch", "sent_bytes_per_step",
    }  # fmt: skip
    assert promised <= set(json.loads((tmp_path / "outcome.json").read_text()))
    for status, target, code in (("finished", 90.0, 3), ("finished", None, 0), ("interrupted", None, 1)):
        assert RunResult(status, "r", "lazy", 1, 1, target_top1=target).exit_code == code


def test_the_outcome_of_an_earlier_version_is_read(tmp_path: Path):
    written = {"status": "reached", "recipe": "r", "sync": "ddp", "world_size": 2, "global_batch": 64, "top1": 76}
    (tmp_path / "outcome.json").write_text(json.dumps(written | {"top5": 93.1, "data_wait_pct": None}))
    read = read_outcome(tmp_path)
    assert read == RunResult("reached", "r", "ddp", 2, 64, top1=76.0, top5=93.1)


def test_concurrent_launchers_leave_a_whole_outcome(tmp_path: Path):
    outcomes = [RunResult("failed", "r", "lazy", 1, 1, message=str(n) * 5000) for n in range(4)]
    with ThreadPoolExecutor(len(outcomes)) as launchers:
        for written in [launchers.submit(one.write, tmp_path) for one in outcomes * 50]:
            written.result()
    assert read_outcome(tmp_path) in outcomes
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


@pytest.mark.parametrize("name", ["job.json", "recipe.toml", "environment.json"])
def test_a_resume_that_is_killed_as_it_writes_leaves_what_was_there(name: str, tmp_path: Path, monkeypatch):
    (tmp_path / name).write_text("whole")
    monkeypatch.setattr(Path, "replace", lambda partial, path: 1 / (path.name != name) and shutil.move(partial, path))
    monkeypatch.setattr("imagenet_fast.metrics.record.environment", lambda *_: {"python": "3.12"})
    with pytest.raises(ZeroDivisionError):
        open_record(job_of(tmp_path), world(0, 1), lambda: 0.0, resumed=3)
    assert (tmp_path / name).read_text() == "whole"


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    leave_run(tmp_path)
    path = tmp_path / "events.jsonl"
    sound = read_events(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    heads = ('"3", "run_s": 1', '3, "run_s": NaN', 'true, "run_s": 1', '3, "run_s": 1e999', f'{"9" * 5000}, "run_s": 1')
    wrong = [b'{"event": "train", "st\n', b"\xff\xfe\n", b"[" * 9999 + b"\n", b"3\n", b"\n", b'{"event": "train"}\n']
    wrong += [f'{{"event": "train", "step": {head}}}\n'.encode() for head in heads]
    path.write_bytes(b"".join([*lines[:2], *wrong, *lines[2:]]))
    assert read_events(tmp_path) == sound
    assert capsys.readouterr().err == f"warning: {path} is damaged: line 3 and 10 more holds no event and is left out\n"


def leave_run(folder: Path, resumed: int | None = None, **pretended: Any) -> RunResult:
    """The record of a run, and its outcome."""
    folder.mkdir(exist_ok=True, parents=True)
    result = outcome()
    if resumed is not None:
        take_back(folder, resumed)
    pretend_run(MetricLogger(Clock().run_s, folder=folder), result, **pretended)
    result.write(folder)
    return result


def strict(text: str) -> Any:
    """As a reader has it that holds to RFC 8259: NaN and infinities are no JSON, and a KeyError."""
    return json.loads(text, parse_constant={}.__getitem__)


@pytest.mark.parametrize("seeds", [30, pytest.param(200, marks=pytest.mark.ci)])
def test_damaged_record_is_still_shown_and_continued(seeds: int, tmp_path: Path):
    leave_run(tmp_path / "sound")
    refused = 0
    for seed in range(seeds):
        chance = random.Random(seed)
        run = tmp_path / "run"
        shutil.copytree(tmp_path / "sound", run)
        victim = run / chance.choice(["events.jsonl", "outcome.json"])
        victim.write_bytes(chance.choice([corrupted, corrupted, with_another_value])(victim.read_bytes(), chance))
        past = read_run(run)
        refused += past.status == "outcome damaged"
        shown(report_table([past]))
        leave_run(run, resumed=400)
        assert len(read_events(run)) > 10, seed
        shutil.rmtree(run)
    assert 0.2 * seeds < refused < 0.6 * seeds


def test_a_damaged_outcome_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    leave_run(tmp_path)
    path = tmp_path / "outcome.json"
    sound = json.loads(path.read_text())
    others = [json.dumps(sound | other) for other in ({"status": "won"}, {"steps": 4.0}, {"top1": "4"}, {"more": 1})]
    for content in ("", "{", "[]", "null", '{"status": "finished"}', '{"steps": NaN}', "[" * 9999, "\0", *others):
        path.write_text(content)
        sentence = f"{path} is damaged or of another version; remove it"
        assert sentence in refusal_of(read_outcome, tmp_path)
        assert read_run(tmp_path).status == "outcome damaged"
        assert f"warning: {sentence}" in capsys.readouterr().err


def test_a_number_that_is_not_finite_is_null_at_any_depth():
    deep = (math.inf, [{"deep": (-math.inf, 1.5)}])
    others = [np.float32("nan"), np.float16(0.5), np.int64(3), True, 2**70, "NaN", "\udcff"]
    assert strict(to_json(deep)) == [None, [{"deep": [None, 1.5]}]]
    assert strict(to_json(others)) == [None, 0.5, 3, True, 2**70, "NaN", "\udcff"]


def test_a_diverged_run_is_recorded_in_strict_json_and_drawn_with_a_gap(tmp_path: Path):
    leave_run(tmp_path, losses=(2.5, math.nan), last_top1=math.nan)
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        strict(line)
    assert strict((tmp_path / "outcome.json").read_text())["top1"] is None
    run = read_run(tmp_path)
    assert str(run.curve("train", "loss")[1]) == "[2.5, nan]"
    headings, row = shown(report_table([run])).splitlines()
    assert re.split("  +", headings) == ["run", "status", "steps", "s/step", "img/s", "MB/step"], "of what was finite"
    assert row.split() == ["resnet50-8gpu", "lazy", "dp8", "failed", "800", "0.160", "21333", "89.50"], "no wait"
    draw_curves([run], tmp_path / "curve.png")


@pytest.mark.ci
def test_mlperfs_own_checker_accepts_the_log_of_a_resumed_run(tmp_path: Path):
    leave_run(tmp_path)
    write_job(Job("resnet50-8gpu", RECIPE, split_batch(RECIPE, 8), None, tmp_path), tmp_path / "job.json")
    leave_run(tmp_path, resumed=400)
    (tmp_path / "mllog.txt").write_text("\n".join(mllog_lines(tmp_path)))
    checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0"]
    checked = subprocess.run([*checker, "mllog.txt"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "SUCCESS" in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_what_happens_while_the_directory_has_another_name_is_recorded_when_it_is_back(tmp_path: Path, capsys):
    """And told once; nothing is made under the old name."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    record = MetricLogger(Clock().run_s, folder=run)
    for step, name in enumerate(("run", "moved", "moved", "run", "run"), start=1):
        next(tmp_path.iterdir()).rename(tmp_path / name)
        record("train", step, loss=1.0)
        assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [event["step"] for event in read_events(run)] == [1, 2, 3, 4, 5]
    gone = f"{run}/events.jsonl has been moved or removed; put it back"
    assert capsys.readouterr().err == f"warning: {gone}, and what happens meanwhile is recorded then\n"
    run.rename(moved)
    record("end", 6)
    assert capsys.readouterr().err == f"warning: the run's last events are not recorded: {gone}\n"


def shown(table: Table, width: int = 120) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def follow(tmp_path: Path, text: io.StringIO, variables: dict[str, str], **pretended: Any) -> str:
    console = Console(file=text, width=100, color_system=None, _environ={"TERM": "xterm"} | variables)
    pretend_run(MetricLogger(Clock().run_s, [ConsoleSink(tmp_path, console=console)]), outcome(), **pretended)
    return text.getvalue()


@pytest.mark.parametrize(
    ("text", "variables"),
    [(io.StringIO, {}), (Terminal, {"TERM": "dumb"}), (io.StringIO, {"FORCE_COLOR": "1"})],
    ids=["a log", "a dumb terminal", "a log with colours"],
)
def test_where_no_panel_can_stand_are_plain_lines(text: type[io.StringIO], variables: dict[str, str], tmp_path: Path):
    printed = follow(tmp_path, text(), variables, scale=65536.0)
    assert "\x1b" not in printed
    assert len(re.findall(r"  loss \d", printed)) == 2
    for line in (
        "recipe written for 8 ranks\n",
        "epoch 1/37  step 400/14800  loss 3.0000  lr 1  20000 img/s  data wait 1.5 %",
        "exposed sync 2.5 ms  sent 89.50 MB/step  loss scale 65536  skipped steps 3\n",
        "top-1 76.00 %  top-5 90.00 %  (best 76.00 %, target 75.9 %)",
        "Target reached: top-1 76.00 % of 75.9 % after 2 epochs.",
        f"tensorboard --logdir {tmp_path}",
    ):
        assert line in printed
    assert re.search(r"waited for data +1\.5 % of training\n", printed)
    assert re.search(r"skipped +6 of 800 steps, since gradients overflowed\n", printed)
    assert "waited for its images" not in printed
    waiting = follow(tmp_path, text(), variables, wait_s=9.0)
    assert waiting.endswith("images: see docs/how-to/slow-runs.md for what helps.\n")
    assert "skipped steps" not in waiting, "where there is no loss scale"


def test_on_a_terminal_the_panel_shows_all_that_matters(tmp_path: Path):
    text = follow(tmp_path, Terminal(), {}, scale=65536.0)
    labels = "epoch, step, img/s, loss, lr, data wait, exposed sync, best top-1, target, ETA"
    expected = [*labels.split(", "), "89.50 MB/step", "loss scale 65536", "skipped steps 6"]
    assert [label for label in expected if label not in text] == []
    assert not re.search("━.*epoch", text), "the bar has a line of its own"


def test_what_the_summary_says_of_the_run_can_be_pasted_into_a_shell(tmp_path: Path):
    for name in ("plain", "it's $HOME; *", "Läufe :smile:[red]"):
        text = follow(tmp_path / name, io.StringIO(), {})
        pasted = {line[2:18].strip(): shlex.split(line[18:]) for line in text.splitlines() if line.startswith("  ")}
        assert pasted["run"] == [str(tmp_path / name)]
        assert pasted["look at it"] == ["tensorboard", "--logdir", str(tmp_path / name)]


def test_a_run_that_failed_before_its_first_step_has_no_figures(tmp_path: Path):
    text = io.StringIO()
    record = MetricLogger(Clock().run_s, [ConsoleSink(tmp_path, console=Console(file=text, width=100))])
    record("end", 0, **vars(outcome()) | {"message": "torchvision has no classifier 'resnet19'"})
    assert text.getvalue() == "Failed in step 0: torchvision has no classifier 'resnet19'\n"


def test_best_accuracy_survives_a_resume(tmp_path: Path):
    """But plain accuracies are not compared with those of mirrored images."""
    pretend_run(MetricLogger(Clock().run_s, folder=tmp_path), outcome(), last_top1=61.0)
    judged = {"epoch": 3, "top1": 58.5, "top5": 90.0, "images": 50000, "eval_s": 9.0}
    for mirrored, more, best in ((False, {}, 61.0), (True, {"top1_mirror": 59.5}, 59.5)):
        text = io.StringIO()
        resumed = ConsoleSink(tmp_path, take_back(tmp_path, 800), Console(file=text, width=100))
        resumed({"event": "run", "step": 800, "note": "", "epochs": 3, "target_mirrored": mirrored})
        resumed({"event": "eval", "step": 1200, "run_s": 210.0} | judged | more)
        assert f"(best {best:.2f} %)" in text.getvalue()


def test_a_report_needs_only_what_was_recorded_if_anything(tmp_path: Path):
    leave_run(tmp_path, wait_s=4.5)
    runs = [replace(read_run(tmp_path), name="tp4"), PastRun(tmp_path / "dp4", [], "failed", "dp4")]
    headings, first, second = shown(report_table(runs)).splitlines()
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
    row = shown(report_table([read_run(tmp_path)])).splitlines()[-1]
    told = ["76.00", "1.5000", "800", "0.160", "89.50"]
    assert row.split() == ["resnet50-8gpu", "lazy", "dp8", *status.split(), *told]


def test_report_step_time_skips_ten_and_weighs_intervals():
    events: list[dict[str, Any]] = [{"event": "run", "global_batch": 10}]
    for step, rate, link_MB in ((4, 1.0, 9.0), (8, 1.0, 9.0), (11, 2.0, 9.0), (14, 5.0, 3.0), (15, 10.0, 7.0)):
        events.append({"event": "speed", "step": step, "images_per_s": rate})
        events.append({"event": "sync", "step": step, "sent_MB": link_MB - 1, "link_MB": link_MB})
    run, begun = (PastRun(Path(), some, "not ended", "tp4") for some in (events, events[:5]))
    assert run.step_s == 2.0
    rows = [shown(report_table([one])).splitlines()[-1].split()[3:] for one in (run, begun)]
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
    assert in_process("report", *map(str, folders), f"{tmp_path}/x/../run/").count("resnet50-8gpu") == 2


@pytest.mark.filterwarnings("error")
def test_labels_are_shown_as_they_are(tmp_path: Path):
    labels = ["a [red]b[/]", "c:100:d", "b$x_{$y", "_draft"]
    evaluated = {"event": "eval", "step": 1, "run_s": 60.0, "top1": 92.0}
    runs = [PastRun(tmp_path, [evaluated], "reached", label) for label in labels]
    assert [label for label in labels if label not in shown(report_table(runs))] == []
    draw_curves(runs, tmp_path / "curve.png")
    axes = new_figure(tmp_path / "curve.png", 10, 4).subplots()
    for label in labels:
        axes.plot([1], [1], label=plot_label(label))
    assert [text.get_text().strip().replace("\\$", "$") for text in axes.legend().get_texts()] == labels


def test_narrow_terminals_wrap_columns_and_cut_no_number(tmp_path: Path):
    runs = two_runs(tmp_path, "one", "a-long-name-of-a-directory")
    runs.append(PastRun(tmp_path, [], "failed", "hybrid-pp2dp2tp2-seed1234567890"))
    for width in (200, 120, 100, 80, 60, 50, 40, 30, 24):
        text = shown(report_table(runs), width=width)
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
    figure = new_figure(tmp_path / "curve.png", 10, 4)
    monkeypatch.setattr("imagenet_fast.bench.plots.new_figure", lambda *_: figure)
    draw_curves([PastRun(tmp_path, events, "reached", "run")], tmp_path / "curve.png")
    plain, mean = (line for line in figure.axes[0].lines if len(line.get_xdata()) == 1)
    assert (plain.get_ydata()[0], mean.get_ydata()[0]) == (92.0, 93.4)


@pytest.mark.parametrize(("target", "reached_s"), [(97.0, 300.0), (95.0, 200.0), (98.0, 400.0)])
def test_the_first_evaluation_that_meets_the_target_counts(target: float, reached_s: float):
    """While a run trains, and where one resumes with a lower target."""
    recipe = parse_recipe("test", tables(target_top1=target))
    judged = RunResult.of("test", recipe, split_batch(recipe, 2))
    resumed = RunResult("reached", "r", "lazy", 2, 512, target_top1=target, time_to_accuracy_s=400.0)
    accuracies = ((90.0, 100.0), (96.0, 200.0), (97.5, 300.0), (98.0, 400.0))
    for top1, run_s in accuracies:
        judged.record_eval(Accuracy(top1=top1), run_s)
    resumed.judge({"run_s": run_s, "top1": top1} for top1, run_s in accuracies)
    assert judged.time_to_accuracy_s == resumed.time_to_accuracy_s == reached_s
    assert (judged.status, judged.top1) == ("reached", 98.0)
    lower = RunResult.of("test", parse_recipe("test", tables(target_top1=90.0)), split_batch(recipe, 2))
    lower.resume_from(asdict(judged))
    assert (lower.status, lower.time_to_accuracy_s) == ("reached", reached_s)
    lower.clear_target()
    assert (lower.status, lower.time_to_accuracy_s) == ("failed", None), "its checkpoint is of later weights"
    lower.record_eval(Accuracy(top1=89.0), 500.0)
    assert (lower.status, lower.time_to_accuracy_s) == ("failed", None)
