"""The programs in examples/, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.command import environment
from tests.pages import ROOT


def by_torchrun(*arguments: str) -> list[str]:
    """The lines that two ranks print."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *arguments],
        capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.ci
def test_train_imagenet_learns_random_images(tmp_path: Path):
    sizes = ("--synthetic=64", "--model=resnet18", "--size=32", "--batch=8", "--epochs=2", "--lr=1.0")
    lines = by_torchrun("examples/train_imagenet.py", *sizes, f"--out={tmp_path / 'weights.pt'}")
    assert [line.split(": loss")[0] for line in lines] == ["epoch 1", "epoch 2"]
    first, second = (float(line.split("loss ")[1].split()[0].rstrip(",;")) for line in lines)
    assert second < first
    assert all(tensor.isfinite().all() for tensor in torch.load(tmp_path / "weights.pt").values())


@pytest.mark.weekly
def test_own_engine_is_exact_and_timed():
    lines = by_torchrun("examples/own_engine.py")
    assert [line.split()[0] for line in lines] == ["lazy", "hybrid", "pairs"]
    assert all("same weights as lazy" in line for line in lines)
