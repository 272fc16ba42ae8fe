"""The run of which most journeys ask something."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18

from tests.e2e.command import SMOKE, imagenet_fast


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`smoke` on two ranks, from torchvision's weights for four classes, eight steps an epoch, with checkpoints of
    steps 6, 8, 12 and 16; one for all of pytest's workers. What it printed is beside it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smoke"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "printed").exists():
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                torch.save(resnet18(num_classes=4).state_dict(), folder / "r.pth")
            done = imagenet_fast(*SMOKE, "--init-from", str(folder / "r.pth"), "--out", str(folder / "run"), "--trace")
            assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
            (folder / "printed").write_text(done.stdout)
    return folder / "run"
