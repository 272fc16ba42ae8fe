"""The programs in examples/, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.e2e.command import environment

ROOT = Path(__file__).parents[2]


def by_torchrun(*arguments: str) -> list[str]:
    """Return the lines that two ranks print."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *arguments],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_train_imagenet_learns_random_images(tmp_path: Path):
    weights = tmp_path / "weights.pt"
    sizes = ("--synthetic=64", "--model=resnet18", "--size=32", "--batch=8", "--epochs=2", "--lr=1.0")
    first, second = by_torchrun("examples/train_imagenet.py", *sizes, f"--out={weights}")
    assert first.startswith("epoch 1: loss ")
    assert second.startswith("epoch 2: loss ")
    losses = [float(line.split("loss ")[1].split()[0].rstrip(",;")) for line in (first, second)]
    assert losses[1] < losses[0]
    assert all(tensor.isfinite().all() for tensor in torch.load(weights).values())


def test_own_engine_is_exact_and_timed():
    lines = by_torchrun("examples/own_engine.py")
    assert [line.split()[0] for line in lines] == ["lazy", "hybrid", "pairs"]
    assert all("same weights as lazy" in line for line in lines)
