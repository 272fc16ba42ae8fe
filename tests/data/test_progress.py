"""Progress is for a person at a terminal: pipes and files get none of it."""

from __future__ import annotations

import io

import pytest

from imagenet_fast.data.progress import measurement_bar, progress_bars
from tests.conftest import Terminal


def moved(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    with measurement_bar() as show:
        show("round 1 of 2", 1, 2)
    with progress_bars("images") as bars:
        bars.advance(bars.add_task("decoding", total=2))
    return stderr.getvalue()


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = moved(Terminal(), monkeypatch)
    assert "round 1 of 2" in shown
    assert "decoding" in shown


def test_progress_is_silent_on_a_pipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert moved(io.StringIO(), monkeypatch) == ""
