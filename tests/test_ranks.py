"""The pool of ranks, the guard of the first tier, signals, and what becomes of tests that need root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.conftest import STOPPING
from tests.guard import counting
from tests.ranks import run
from tests.root import require_root


def number_and_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def processes() -> list[int]:
    return [process for _, process in run(2, number_and_process)]


def draw() -> float:
    return float(torch.rand(1))


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("as a test would")
    dist.barrier()


def hang() -> None:
    time.sleep(60)


LEAVE: dict[str, Callable[[], object]] = {
    "environment OWN=1": lambda: os.environ.update(OWN="1"),
    "process_groups": lambda: dist.new_group([0, 1]),
    "python_threads: own": lambda: threading.Thread(target=time.sleep, args=(60,), name="own", daemon=True).start(),
    "dtype torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "threads 2": lambda: torch.set_num_threads(2),
}


def leave(what: str) -> None:
    LEAVE[what]()


def test_ranks_are_forked_once_and_numbered_and_begin_with_the_same_random_numbers():
    first = run(2, number_and_process)
    assert [rank for rank, _ in first] == [0, 1]
    assert run(2, number_and_process) == first
    assert run(2, draw) == run(2, draw)
    assert not set(first) & set(run(2, number_and_process, fresh=True))


def test_a_failure_is_told_and_ranks_are_forked_anew():
    before = processes()
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n(?s:.*)ValueError: as a test would"):
        run(2, fail_on_rank_1)
    assert not set(before) & set(processes())


def test_a_hang_is_told_with_its_stack():
    with pytest.raises(AssertionError, match=r"rank [01] of 2 ended with exit code 1\n(?s:.*)in hang"):
        run(2, hang, limit_s=0.2)


@pytest.mark.parametrize("what", LEAVE)
def test_what_is_left_behind_fails(what: str):
    before = processes()
    with pytest.raises(AssertionError, match=f"rank 0 keeps {what}"):
        run(2, leave, what)
    assert not set(before) & set(processes())


@pytest.mark.usefixtures("subprocesses")
def test_the_guard_sees_processor_time_and_processes():
    with counting() as cost:
        assert not cost.objection(())
        subprocess.run(["true"], check=True)
        assert "subprocess.Popen" in cost.objection(())
        assert not cost.objection(["tmp_path", "subprocesses"])
        assert not cost.doubt()
        cost.begun_s -= 1000
        assert "mark it `ci`" in cost.doubt()


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_user_is_told_what_a_test_needs(ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(outcome, match=r"needs root .* you are not root"):
        require_root()


@pytest.mark.ci
def test_signals_that_a_starter_ignores_or_blocks_are_given_back():
    """As a shell in the background, nohup or a CI runner does: a test that needs them passes all the same."""

    def hostile() -> None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        os.close(0)

    one = "tests/launch/test_refusals.py::test_after_torchrun_a_signal_interrupts_as_before"
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", one]
    done = subprocess.run(command, preexec_fn=hostile, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
