"""Disks that are full or read-only under real jobs: a clear end, and nothing lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import make_images
from tests.e2e.command import events_of, outcome_of, setting, wait_for
from tests.faults.jobs import FUSED, Running, digest, start, train

pytestmark = pytest.mark.weekly


@contextmanager
def small_disk(at: Path, mebibytes: int) -> Iterator[None]:
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """By a mount of its own: its disk cannot be as long as files there are being written."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def said(running: Running) -> str:
    """By a command that has come to a bad end."""
    assert running.ended(240) in (1, 2)
    return running.printed


@pytest.mark.usefixtures("root")
def test_full_or_read_only_disk_ends_no_training(tmp_path: Path):
    undisturbed = train(tmp_path / "undisturbed", *FUSED)
    checkpoint = next((tmp_path / "undisturbed" / "checkpoints").glob("step-*"))
    mebibytes = sum(file.stat().st_size for file in checkpoint.iterdir()) / 2**20
    disk = tmp_path / "disk"
    with small_disk(disk, int(1.5 * mebibytes) + 4):
        out = disk / "run"
        running = start(out, *FUSED)
        assert running.ended(240) == 0, running.printed[-2000:]
        log = running.printed
        assert "warning: the checkpoint of step 8 failed: rank 0 on " in log
        assert "(No space left on device); free space there; training goes on, and it is tried again" in log
        assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000004"]
        assert [event["step"] for event in events_of(out, "train")] == list(range(1, 21))
        assert "; free space there; the final weights are written, so the run has ended all the same\n" in log
        assert outcome_of(out)["status"] == "finished"
        assert digest(out) == undisturbed
        assert train(out, *FUSED) == undisturbed
        assert not events_of(out, "resume"), "it is not trained again"
        (out / "outcome.json").unlink()  # as if it had been killed before it could say so

        subprocess.run(["mount", "-o", f"remount,size={int(8 * mebibytes) + 64}m", disk], check=True)
        running = start(out, *FUSED)
        wait_for(lambda: bool(events_of(out, "resume")) and running.step > 4)
        with read_only(out / "checkpoints"):
            log = said(running)
            assert "cannot be written (Read-only file system), and 2 more; make it writable; training goes on" in log
            assert f"failed: trained to the end, but {out}/checkpoints/final.safetensors cannot be written (" in log
            log = said(start(out, *FUSED))
            assert f"(Read-only file system: {out}/checkpoints); make that writable, or give another --out" in log
        assert train(out, *FUSED) == undisturbed


def test_storage_that_is_away_for_a_while_costs_a_restart_and_no_step(tmp_path: Path):
    """Of two ranks the one that cannot read saves, while the other waits for it in the next step."""
    images = make_images(tmp_path / "images", train=600, val=7)
    settings = ("epochs=2", "global_batch=20", "log_every=1", "checkpoint.every_minutes=0", "target_top1=none")
    words = ("--recipe", "demo", "--data", str(images), "--nproc", "2", *setting(*settings))
    running = start(tmp_path / "run", "--max-restarts", "5", "--resume", "auto", job=words)
    wait_for(lambda: running.step >= 3)
    (images / "train/class0").rename(tmp_path / "away")
    wait_for(lambda: "cannot be read (No such file or directory)" in running.printed)
    (tmp_path / "away").rename(images / "train/class0")
    assert running.ended(240) == 0, running.printed[-2000:]
    (resumed,) = events_of(running.out, "resume")
    assert 3 <= resumed["step"] < 30
    assert [event["step"] for event in events_of(running.out, "train")] == [*range(1, 61)]
