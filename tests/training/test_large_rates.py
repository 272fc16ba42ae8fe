"""Real training at the full rate of a recipe for large batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests
from imagenet_fast.data.download import make_digits
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import find_recipe, load_recipe
from tests.ranks import run
from tests.training.jobs import Told, train_job

SMALL = (
    "ranks=1", "global_batch=16", "epochs=1", "log_every=1", "data.dataset=digits", "data.loader=folder",
    "data.image_size=67", "data.resize=67", "data.flip=false", "data.workers=1", "precision={kind='fp32'}",
    "schedule={kind='step', milestones=[], warmup_epochs=0.33, start_lr=1.0}",
)  # fmt: skip
"""24 steps: the rate rises over the first 8 and stays."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """384 digits to train on; each class keeps two to validate."""
    root = tmp_path_factory.mktemp("digits") / "digits"
    make_digits(root)
    for split, kept in (("train", 384), ("val", 20)):
        for image in sorted((root / split).glob("*/*.jpg"), key=lambda path: path.name)[kept:]:
            image.unlink()
    return root


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["alexnet-512gpu", "alexnet-8gpu"])
def test_alexnet_learns_at_its_full_rate(name: str, digits: Path, tmp_path: Path):
    (losses,) = run(1, _losses, name, digits, tmp_path, limit_s=600.0)
    assert max(losses) < losses[0] + 0.3
    assert sum(losses[-6:]) < sum(losses[:6])


def _losses(name: str, digits: Path, folder: Path) -> list[float]:
    """Of each step."""
    recipe, told = load_recipe(find_recipe(name), overrides=SMALL), Told()
    train_job(Job(name, recipe, split_batch(recipe, 1), digits, folder), tests.world(), sinks=[told])
    return told.losses
