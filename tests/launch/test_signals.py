"""Signals reach a process, whatever it does at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from imagenet_fast.launch.signals import interrupt_on_signals, signals_held


@pytest.mark.usefixtures("own_signals", "subprocesses")
def test_a_signal_while_a_process_starts_is_answered_after_it():
    """Python drops what a handler raises in what it calls as it forks."""
    interrupt_on_signals()
    started: list[bytes] = []
    with pytest.raises(KeyboardInterrupt):
        _start_and_signal(started)
    assert b"default_int_handler" in started[0], "and the process gets its own"


def _start_and_signal(started: list[bytes]) -> None:
    with signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        told = [sys.executable, "-c", "import signal; print(signal.getsignal(2))"]
        started.append(subprocess.run(told, capture_output=True, check=True).stdout)
