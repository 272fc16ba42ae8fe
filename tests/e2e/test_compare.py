"""One command trains a recipe with several engines, each on hosts of its own, and says who was first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import COMMAND, environment, events_of, imagenet_fast, outcome_of, wait_for


def test_engines_are_compared_over_a_network_of_ones_own(root: None, tmp_path: Path):
    out = tmp_path / "runs"
    done = imagenet_fast(
        "compare", "--recipe", "smoke", "--sync", "lazy,sparse", "--hosts", "2", "--rate", "1gbit", "--out", str(out),
        "--set", "data.train_images=64", "--set", "epochs=1", "--set", "sparse.dense_epochs=0",
        "--set", "sparse.ramp_epochs=0", "--set", "sparse.sparsity=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {name: json.loads((out / name / "outcome.json").read_text()) for name in ("lazy", "sparse")}
    assert all(outcome["status"] == "finished" and outcome["steps"] == 2 for outcome in outcomes.values())
    assert 0.4 < outcomes["sparse"]["sent_bytes_per_step"] / outcomes["lazy"]["sent_bytes_per_step"] < 0.6
    assert (out / "compare.png").stat().st_size > 10_000
    assert all(list((out / name / "tb").iterdir()) for name in outcomes)
    table = done.stdout[done.stdout.index("run ") :]
    assert "lazy" in table
    assert "sparse" in table


SHORT = ("--recipe", "smoke", "--hosts", "2", "--set", "data.train_images=64", "--set", "schedule.warmup_epochs=0")


def test_a_run_that_fails_takes_no_other_with_it(tmp_path: Path):
    out = tmp_path / "my runs"
    (out / "ring").mkdir(parents=True)
    (out / "ring" / "checkpoints").touch()  # so it fails in the end, where its weights should go
    (out / "allreduce" / ".job.json").mkdir(parents=True)  # and this one before it can record anything
    done = imagenet_fast(
        "compare", *SHORT, "--sync", "ring,allreduce,lazy", "--set", "epochs=1", "--set", "target_top1=0.01",
        "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    table, _, rest = done.stdout[done.stdout.rindex("run ") :].partition("ring ended")
    ring, allreduce, lazy = (line.split() for line in table.splitlines()[1:])
    assert ring[:2] == ["ring", "failed"]
    assert ring[2:5:2] == [f"{outcome_of(out / 'ring')['top1']:.2f}", "2"]
    assert allreduce == ["allreduce", "nothing", "recorded", *"––––––"]
    assert lazy[:2] == ["lazy", outcome_of(out / "lazy")["status"]]
    assert f" with exit code 1; what there is of it lies in {out / 'ring'}\n" in rest
    assert f"allreduce ended with exit code 1; what there is of it lies in {out / 'allreduce'}\n" in rest
    assert "lazy ended" not in rest
    assert f"tensorboard --logdir '{out}'\n" in rest
    assert (out / "compare.png").stat().st_size > 10_000
    assert done.stderr.count("warning: target_top1") == 1, "once, not once a run"


def test_what_the_first_runs_ranks_find_wrong_with_the_usage_ends_it_all(tmp_path: Path):
    done = imagenet_fast(
        "compare", *SHORT, "--sync", "lazy,ring", "--set", "data.train_images=8", "--out", str(tmp_path / "runs")
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch("error: .*fewer than one global batch.*\n", done.stderr)
    assert "ring (2 of 2)" not in done.stdout
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_shows_what_has_finished_and_leaves_nothing_running(tmp_path: Path):
    out = tmp_path / "runs"
    process = subprocess.Popen(
        [*COMMAND, "compare", *SHORT, "--sync", "lazy,ring,allreduce", "--set", "epochs=8", "--set", "log_every=1",
         "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(),
    )  # fmt: skip
    wait_for(lambda: (out / "ring" / "events.jsonl").exists() and len(events_of(out / "ring", "train")) > 1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in errors
    table = printed[printed.rindex("run  ") :]
    assert re.search("^lazy +(finished|reached) ", table, re.MULTILINE)
    assert re.search("^ring +interrupted ", table, re.MULTILINE)
    assert "allreduce" not in table
    assert f"what there is of it lies in {out / 'ring'}\n" in table
    assert (out / "compare.png").exists()
    assert not any(child.is_running() for child in started)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sync", "lazy,rng"), "sync.kind is 'rng'"),
        (("--sync", "lazy", "--rate", "fast"), "such as 250mbit"),
        (("--sync", "lazy", "--data", "photos"), "--data photos would not be read"),
        (("--sync", "lazy", "--seeds", "one"), "not a list of whole numbers"),
        (("--sync", "lazy", "--set", "sync.colective=ring"), "unknown key sync.colective"),
        (("--sync", "lazy", "--set", "ring.bucket_mb=1"), "is for ring, which is not in --sync lazy"),
        (("--sync", "lazy,ring,lazy"), "lazy would be run twice"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    refusal: Callable[..., str],
):
    runs = tmp_path / "runs"
    assert sentence in refusal("compare", "--recipe", "smoke", "--out", str(runs), *arguments)
    assert not runs.exists()
