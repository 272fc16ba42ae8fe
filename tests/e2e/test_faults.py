"""Ranks that are killed, stopped or hang, in real jobs: the run ends in time, and says which rank, where and when."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from imagenet_fast.checkpoint import newest
from tests.e2e.command import COMMAND, environment, events_of, imagenet_fast, outcome_of, setting, wait_for

ENDLESS = setting("epochs=100000", "log_every=1", "timeout.step_s=5")


def start(*arguments: str, run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "train", *ENDLESS, "--nproc", "2", "--out", str(run), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def rank(number: int, of: subprocess.Popen[str]) -> int:
    """Its process."""
    return next(p.pid for p in psutil.Process(of.pid).children() if p.environ().get("RANK") == str(number))


def has_trained(run: Path, seconds: float) -> bool:
    """True if the run's steps, as it has recorded them, span ``seconds``."""
    steps = events_of(run, "train") if (run / "events.jsonl").exists() else []
    return bool(steps) and steps[-1]["run_s"] - steps[0]["run_s"] > seconds


@pytest.mark.weekly
def test_a_rank_that_is_killed_or_stopped_or_reads_for_ever_is_named(image_dir: Path, tmp_path: Path):
    data = tmp_path / "data"
    shutil.copytree(image_dir, data)
    for number in range(8):
        os.mkfifo(data / "train" / "class1" / f"never{number}.jpg")  # as from a file server that does not answer
    killed, stopped, reading = (tmp_path / name for name in ("killed", "stopped", "reading"))
    runs = {
        killed: start("--recipe", "smoke", run=killed),
        stopped: start("--recipe", "smoke", run=stopped),
        reading: start(
            "--recipe", "demo", "--data", str(data),
            *setting("global_batch=16", "micro_batch=8", "data.loader=folder", "timeout.first_step_s=20"), run=reading,
        ),
    }  # fmt: skip
    try:
        for run in (killed, stopped):
            wait_for(lambda run=run: has_trained(run, 3.0))  # its last heartbeat is of a step
        died = rank(1, runs[killed])
        os.kill(died, signal.SIGKILL)
        assert not psutil.Process(rank(1, runs[reading])).children(), "its loaders are threads"
        frozen = rank(0, runs[stopped])
        os.kill(frozen, signal.SIGSTOP)
        other = psutil.Process(rank(1, runs[stopped]))
        wait_for(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)
        os.kill(frozen, signal.SIGCONT)  # torchrun has told it to end, and would wait for 30 s
        printed = {run: process.communicate(timeout=120) for run, process in runs.items()}
    finally:
        for process in runs.values():
            process.terminate()
    assert not psutil.pid_exists(died)
    for run, sentence in (
        (killed, r"rank 1 on \S+ (was killed by SIGKILL|stopped answering) at step \d+, in \w+"),
        (stopped, r"rank 0 on \S+ stopped answering at step \d+, in \w+; rank 1 (waited in sync|was in \w+)"),
        (reading, r"rank \d\S* on \S+ has been in data at step \d+ for \d+ s, longer than timeout.\w+ allows"),
    ):
        message = outcome_of(run)["message"]
        assert re.match(sentence, message), message
        assert f"failed: {message}" in printed[run][0]
        assert "Traceback" not in printed[run][1]
        assert (runs[run].returncode, outcome_of(run)["status"]) == (1, "failed")


@pytest.mark.weekly
def test_nonfinite_run_ends_and_resumes_from_before(tmp_path: Path):
    """In the second epoch the rate is 1e30 times what it was: step 9 leaves wild weights, and 10 has no loss."""
    run = tmp_path / "run"
    explodes = (
        "--recipe", "smoke", "--nproc", "2", "--out", str(run),
        *setting("global_batch=8", "micro_batch=2", "data.train_images=64", "data.val_images=15", "log_every=1"),
        *setting("checkpoint.every_steps=1", "optim.lr=0.05", "schedule.kind=step", "schedule.warmup_epochs=0"),
        *setting("schedule.milestones=[1.0]", "schedule.gamma=1e30"),
    )  # fmt: skip
    spoilt = r"62 of its 62 parameters are not finite, the first of them in conv1 \(Conv2d\)"
    seen = r"in step 10 \w[\w.]* \(\w+\) was the first layer whose output was not finite though its input was"
    for resumed, most, steps, where, look in (
        (0, 2, 2, spoilt, " and looks at every layer in step 10"),
        (1, 100, 7, seen, ""),  # at the end of the second epoch, where there are no final weights to be had
    ):
        ended = imagenet_fast("train", *explodes, *setting(f"nonfinite_steps={most}"), "--resume", "auto")
        outcome, kept = outcome_of(run), newest(run / "checkpoints")
        begins = f"the loss has not been finite for {steps} steps, from step 10 on: on rank 0 {where}; lower optim.lr "
        ends = f"; --resume goes on from the checkpoint of step 8{look}"
        assert re.fullmatch(f"{begins}.*{ends}", outcome["message"]), outcome["message"]
        assert f"failed: {outcome['message']}" in ended.stdout
        assert (ended.returncode, outcome["status"], outcome["resumed"]) == (1, "failed", resumed)
        assert kept is not None
        assert kept.manifest.step == 8
        assert not (run / "checkpoints" / "final.safetensors").exists()
    assert [event["step"] for event in events_of(run, "resume")] == [8]
