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
        for number, image in enumerate(sorted((root / split).glob("*/*.jpg"), key=lambda path: path.name)):
            if number >= kept:
                image.unlink()
    return root


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["alexnet-512gpu", "alexnet-8gpu"])
def test_alexnet_learns_at_its_full_rate(name: str, digits: Path, tmp_path: Path):
    losses = losses_of(name, digits, tmp_path)
    assert max(losses) < losses[0] + 0.3
    assert sum(losses[-6:]) < sum(losses[:6])


@pytest.mark.weekly
def test_alexnet_512gpu_does_not_learn_with_plain_biases(digits: Path, tmp_path: Path):
    """Why the recipe scales them."""
    assert max(losses_of("alexnet-512gpu", digits, tmp_path, "optim.biases=plain")) > 6


def losses_of(name: str, digits: Path, folder: Path, *changes: str) -> list[float]:
    """The loss of each step, on one rank."""
    losses: list[float]
    (losses,) = run(1, _train, name, digits, folder, changes, limit_s=600.0)
    return losses


def _train(name: str, digits: Path, folder: Path, changes: tuple[str, ...]) -> list[float]:
    recipe, told = load_recipe(find_recipe(name), overrides=[*SMALL, *changes]), Told()
    train_job(Job(name, recipe, split_batch(recipe, 1), digits, folder), tests.world(), sinks=[told])
    return told.losses
