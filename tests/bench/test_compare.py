"""`imagenet-fast compare`, interrupted. What it refuses, and whole comparisons, are in e2e."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from imagenet_fast.bench import compare
from imagenet_fast.cli.main import app
from tests.e2e.command import wait_for

TRAINS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
run = pathlib.Path(sys.argv[1])
run.mkdir(parents=True)
(run / "job.json").touch()
time.sleep(60)
"""


@pytest.mark.usefixtures("own_signals", "subprocesses")
@pytest.mark.parametrize("saved", [True, False])
def test_after_ctrl_c_it_says_how_to_go_on_with_the_run_if_that_was_saved(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started = []

    def start(arguments: list[str], *_: object) -> subprocess.Popen[bytes]:
        started.append(Path(arguments[arguments.index("--out") + 1]))
        return subprocess.Popen([sys.executable, "-S", "-c", TRAINS, str(started[-1]), "4" if saved else "1"])

    def interrupt(seconds: float) -> None:
        wait_for(lambda: (started[0] / "job.json").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_start", start)
    monkeypatch.setattr(compare, "time", SimpleNamespace(sleep=interrupt, monotonic=lambda: 0.0))
    out = tmp_path / "my runs"
    words = ("--recipe", "smoke", "--sync", "lazy,ring", "--nproc", "2", "--out", str(out))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *words], catch_exceptions=False)
    assert done.exit_code == 1
    assert started == [out / "lazy"], "the other run is not begun"
    assert f"lazy ended with exit code {4 if saved else 1}; its partial results are in {out / 'lazy'}" in done.output
    assert (f"imagenet-fast train --resume '{out / 'lazy'}' --nproc 2 goes on with it" in done.output) == saved


@pytest.mark.usefixtures("own_signals")
def test_a_signal_before_the_first_process_is_no_exit_code(monkeypatch: pytest.MonkeyPatch):
    def start() -> subprocess.Popen[bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        compare._wait([start], saving_s=1.0)
    assert not isinstance(interrupt.value, compare.Interrupted)
