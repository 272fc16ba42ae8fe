"""A job that is told to stop, at its command or at one of its ranks: all save after the same step, and go on later."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import outcome_of, wait_for
from tests.faults.jobs import Running, start, train

pytestmark = pytest.mark.weekly

FUSED = ("--set", "sync.threshold_mb=4")  # else each run cuts its messages as it has measured


def test_whoever_is_told_to_stop_all_save_and_the_same_command_goes_on(tmp_path: Path):
    undisturbed = train(tmp_path / "undisturbed", *FUSED)
    out = tmp_path / "stopped"
    for at, number in ((3, signal.SIGINT), (7, signal.SIGTERM)):
        assert _stopped(start(out, *FUSED), at, number) == 4
        assert outcome_of(out)["status"] == "preempted"
    running = start(out, *FUSED)
    wait_for(lambda: running.step >= 12)
    begun = time.monotonic()
    running.ranks[1].send_signal(signal.SIGUSR1)
    assert running.ended(60) == 4
    assert time.monotonic() - begun < 20
    assert outcome_of(out)["resumed"] == 2
    assert train(out, *FUSED) == undisturbed
    assert outcome_of(out)["resumed"] == 3
    assert train(out, *FUSED) == undisturbed, "a run that has ended ends again"


def test_told_twice_it_ends_at_once_and_harms_nothing(tmp_path: Path):
    undisturbed = train(tmp_path / "undisturbed", *FUSED)
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
    assert train(tmp_path / "stopped", *FUSED) == undisturbed


def _stopped(running: Running, at: int, number: signal.Signals) -> int:
    wait_for(lambda: running.step >= at)
    begun = time.monotonic()
    running.command.send_signal(number)
    code = running.ended(60)
    assert time.monotonic() - begun < 20
    return code
