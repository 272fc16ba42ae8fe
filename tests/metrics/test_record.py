"""What a run leaves behind, without running one."""

from __future__ import annotations

import io
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from imagenet_fast.atomic_io import to_json
from imagenet_fast.metrics.console import ConsoleSink
from imagenet_fast.metrics.events import MetricLogger, read_events, take_back
from imagenet_fast.metrics.record import open_record
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, write_job
from imagenet_fast.recipe.load import load_recipe
from imagenet_fast.training.clock import Clock
from scripts.mllog import mllog_lines
from tests import world
from tests.conftest import Terminal
from tests.metrics.past import leave_run, outcome, pretend_run, strict
from tests.training.jobs import job_of

RECIPE = load_recipe("resnet50-8gpu")


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


def test_a_number_that_is_not_finite_is_null_at_any_depth():
    deep = (math.inf, [{"deep": (-math.inf, 1.5)}])
    others = [np.float32("nan"), np.float16(0.5), np.int64(3), True, 2**70, "NaN", "\udcff"]
    assert strict(to_json(deep)) == [None, [{"deep": [None, 1.5]}]]
    assert strict(to_json(others)) == [None, 0.5, 3, True, 2**70, "NaN", "\udcff"]


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


def follow(tmp_path: Path, **pretended: Any) -> str:
    text = Terminal()
    sink = ConsoleSink(tmp_path, console=Console(file=text, width=100, highlight=False))
    pretend_run(MetricLogger(Clock().run_s, [sink]), outcome(), **pretended)
    return text.getvalue()


def test_what_is_recorded_is_told_in_lines(tmp_path: Path):
    printed = follow(tmp_path, scale=65536.0)
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
    assert "waited for images" not in printed
    waiting = follow(tmp_path, wait_s=9.0)
    assert waiting.endswith("another data.workers, or shrink or decode them once (data prepare).\n")
    assert "skipped steps" not in waiting, "where there is no loss scale"


def test_what_the_summary_says_of_the_run_can_be_pasted_into_a_shell(tmp_path: Path):
    for name in ("plain", "it's $HOME; *", "Läufe :smile:[red]"):
        text = follow(tmp_path / name)
        pasted = {line[2:18].strip(): shlex.split(line[18:]) for line in text.splitlines() if line.startswith("  ")}
        assert pasted["run"] == [str(tmp_path / name)]
        assert pasted["look at it"] == ["tensorboard", "--logdir", str(tmp_path / name)]


def test_a_run_that_failed_before_its_first_step_has_no_figures(tmp_path: Path):
    text = io.StringIO()
    record = MetricLogger(Clock().run_s, [ConsoleSink(tmp_path, console=Console(file=text, width=100))])
    record("end", 0, **vars(outcome()) | {"message": "torchvision has no classifier 'resnet19'"})
    assert text.getvalue() == "Failed in step 0: torchvision has no classifier 'resnet19'\n"


def test_how_steps_are_taken_is_told(tmp_path: Path):
    text = io.StringIO()
    record = MetricLogger(Clock().run_s, [ConsoleSink(tmp_path, console=Console(file=text, width=100))])
    record("graph", 6, replayed=True, images=[128, 3, 224, 224])
    record("graph", 9, replayed=False, why="sync.kind 'sparse' decides in each step what to send")
    replayed, launched = text.getvalue().splitlines()
    assert replayed == "steps of 128 images of 224x224 are replayed from a CUDA graph after step 6"
    assert launched.endswith("not replayed from a CUDA graph: sync.kind 'sparse' decides in each step what to send")


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
