"""Disks that are full or read-only under real jobs: a clear end, and nothing lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.command import events_of, outcome_of, wait_for
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
        log = said(start(out, *FUSED))
        assert "warning: the checkpoint of step 8 failed: rank 0 on " in log
        assert "(No space left on device); free space there; training goes on, and it is tried again" in log
        assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000004"]
        assert [event["step"] for event in events_of(out, "train")] == list(range(1, 21))
        assert outcome_of(out)["status"] == "failed"
        assert outcome_of(out)["message"].startswith("trained to the end, but the checkpoint of step 20 failed: rank ")
        assert outcome_of(out)["message"].endswith("; free space there, then resume from step-00000004")
        assert digest(out) == undisturbed

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
