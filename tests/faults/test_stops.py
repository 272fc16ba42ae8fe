"""A job that is told to stop while it compiles or evaluates, or twice, loses nothing; a rank that hangs is named."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import events_of, outcome_of, setting, wait_for
from tests.faults.jobs import FUSED, digest, start, train

pytestmark = pytest.mark.weekly

MANY = (*FUSED, "--set", "data.val_images=2100")


def test_stop_in_evaluation_drops_it_and_resumes_bitwise(tmp_path: Path):
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "stopped"
    expected = train(undisturbed, *MANY)
    for step in (10, 20):
        running = start(out, *MANY)
        wait_for(lambda running=running, step=step: running.step >= step)
        time.sleep(0.5)
        begun = time.monotonic()
        if step == 10:
            running.command.send_signal(signal.SIGTERM)
        else:
            running.ranks[1].send_signal(signal.SIGUSR1)
        assert running.ended(60) == 4, running.printed
        assert time.monotonic() - begun < 20
        outcome = outcome_of(out)
        assert (outcome["status"], outcome["steps"]) == ("preempted", step)
        assert outcome["message"].startswith(f"stopped by a signal after step {step}, and saved; ")
        assert f"Stopped by a signal after step {step}, and saved" in running.printed
        assert len(events_of(out, "eval")) == step // 10 - 1, "dropped"
    assert train(out, *MANY) == expected
    for name, values in (("train", ("step", "loss")), ("eval", ("step", "top1", "top5"))):
        there, here = ([[e[v] for v in values] for e in events_of(run, name)] for run in (undisturbed, out))
        assert here == there


def test_a_stop_while_it_compiles_ends_within_its_grace_without_loss(tmp_path: Path):
    run = tmp_path / "run"
    job = ("--recipe", "smoke", "--resume", "auto", "--sync", "allreduce")
    running = start(run, *setting("compile=true", "checkpoint.grace_s=4", "log_every=1"), job=job)
    wait_for(lambda: (run / "events.jsonl").exists() and bool(events_of(run, "run")))
    time.sleep(1)
    begun = time.monotonic()
    running.command.send_signal(signal.SIGTERM)
    assert running.ended(60) == 4, running.printed
    assert time.monotonic() - begun < 20
    assert outcome_of(run)["status"] == "preempted"
    assert outcome_of(run)["message"] in running.printed


def test_a_run_under_nohup_outlives_its_terminal_and_one_told_twice_ends_at_once_and_harms_nothing(tmp_path: Path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which processes inherit
    try:
        running = start(tmp_path / "undisturbed", *FUSED)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: running.step >= 3)
    for process in (running.command, *running.ranks):
        process.send_signal(signal.SIGHUP)
    assert running.ended(240) == 0, running.printed
    running = start(tmp_path / "stopped", *FUSED)
    wait_for(lambda: running.step >= 6)
    ranks = running.ranks
    running.command.send_signal(signal.SIGINT)
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)  # it would never have saved
    time.sleep(2)
    running.command.send_signal(signal.SIGINT)
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)
    running.ended(60)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert train(tmp_path / "stopped", *FUSED) == digest(tmp_path / "undisturbed")
