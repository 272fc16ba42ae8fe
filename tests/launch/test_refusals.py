"""What a rank refuses is heard, whichever is ended before it speaks, and is not tried again and again."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path

import pytest

from imagenet_fast import errors
from imagenet_fast.launch import launcher
from imagenet_fast.launch.rendezvous import LaunchConfig
from tests.conftest import make_images
from tests.e2e.command import events_of, imagenet_fast

SLOW_TO_SPEAK = """\
import os, time
if os.environ.get("RANK") == "0":
    import imagenet_fast.errors as errors
    at_once = errors.exit_with_error
    def speak_late(*said):
        time.sleep(20)
        at_once(*said)
    errors.exit_with_error = speak_late
"""


def test_a_refusal_is_printed_once_though_rank_0_is_ended_before_it_speaks(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_SPEAK)
    wrong = ("--set", "data.train_images=8", "--nproc", "2", "--out", str(tmp_path / "run"))
    ended = imagenet_fast("train", "--recipe", "smoke", *wrong, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert re.fullmatch(r"error: .*fewer than one global batch.*\n", ended.stderr)
    assert not (tmp_path / "run").exists()


def test_a_bad_image_ends_a_run_that_may_restart_at_once(tmp_path: Path):
    images = make_images(tmp_path / "images", train=30, val=6)
    bad = sorted(images.glob("train/*/*.jpg"))[7]
    bad.write_bytes(b"no image")
    run = tmp_path / "run"
    ended = imagenet_fast(
        "train", "--recipe", "demo", "--data", str(images), "--nproc", "1", "--set", "data.loader=folder",
        "--set", "global_batch=4", "--set", "micro_batch=4", "--set", "epochs=2", "--set", "ranks=1",
        "--set", "checkpoint.every_steps=1", "--set", "data.prefetch=1", "--out", str(run), "--max-restarts", "3",
    )  # fmt: skip
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.count(os.fspath(bad)) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not events_of(run, "resume")


def test_a_run_whose_own_files_are_in_the_way_says_so_once(tmp_path: Path):
    run = tmp_path / "run"
    smoke = ("train", "--recipe", "smoke", "--nproc", "1", "--out", str(run), "--set", "checkpoint.every_steps=2")
    assert imagenet_fast(*smoke, "--set", "epochs=1").returncode in (0, 3)
    for name in ("environment.json", "events.jsonl"):
        (run / name).rename(tmp_path / name)
        (run / name).mkdir()
        ended = imagenet_fast(*smoke, "--set", "epochs=2", "--resume", "auto")
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert re.fullmatch(rf"error: {re.escape(str(run / name))} cannot be (read|written) .*\n", ended.stderr)
        assert "failed" not in ended.stdout
        (run / name).rmdir()
        (tmp_path / name).rename(run / name)


def test_a_file_name_that_is_no_utf8_is_heard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(errors, "_refusals", [])
    errors.write_errors_to(tmp_path)
    sentence = f"{os.fsdecode(b'caf' + bytes([233]) + b'.jpg')} cannot be decoded; replace it"
    with pytest.raises(SystemExit) as end:
        errors.exit_with_error(sentence)
    assert end.value.code == 2
    assert errors.first_error_in(tmp_path) == (sentence, 2)


def test_a_local_rank_in_the_shell_silences_nothing():
    """Without RANK this process is no rank, and nobody else would print the error."""
    ended = imagenet_fast("plan", "--recipe", "nonsense", LOCAL_RANK="3")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no recipe 'nonsense'")


@pytest.mark.usefixtures("own_signals")
def test_after_torchrun_a_signal_interrupts_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun leaves its handlers, whose exception nobody would catch; what is ignored stays so, as under nohup."""
    told: list[str] = []

    def as_torchrun(arguments: argparse.Namespace) -> None:
        told.extend(arguments.signals_to_handle.split(","))
        signal.signal(signal.SIGINT, lambda *_: 1 / 0)

    monkeypatch.setattr("torch.distributed.run.run", as_torchrun)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert launcher._run_ranks(tmp_path / "train.json", LaunchConfig(1), 5.0) == (0, "")
    assert told == ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
