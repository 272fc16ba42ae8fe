"""The number of ranks decides how a run is computed, not what it learns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import tests
from imagenet_fast.metrics import Event
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from tests.conftest import make_images, tables
from tests.ranks import run
from tests.training.jobs import train_job

STEPS, IMAGES = 6, 40


@pytest.mark.weekly
def test_one_two_and_four_ranks_agree_in_every_loss_and_in_accuracy(tmp_path: Path):
    """Batch-norm statistics included, in training and in evaluation: micro-batches do not depend on the ranks.

    What is left is the order of additions, which training a network amplifies, and on images with flat areas
    (ties in max-pooling) quickly: hence smooth images.
    """
    images = make_images(tmp_path / "images", train=64, val=IMAGES)
    with ThreadPoolExecutor() as at_once:
        (alone,), (both, _), (four, *_) = at_once.map(
            lambda case: run(case[0], _train, case[1], images, tmp_path / str(case[0])),
            [(1, "lazy"), (2, "lazy"), (4, "hybrid")],
        )
    assert len(alone.losses) == STEPS
    assert alone.losses[-1] < 0.9 * alone.losses[0], "it learns"
    for other in (both, four):
        assert other.losses == pytest.approx(alone.losses, rel=1e-3)
        assert other.correct == pytest.approx(alone.correct, abs=2), "images, after each epoch"


class Seen:
    """A sink that keeps what is compared."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.correct: list[float] = []

    def write(self, event: Event) -> None:
        if event.name == "train":
            self.losses.append(event.values["loss"])
        elif event.name == "eval":
            self.correct.append(event.values["top1"] / 100 * IMAGES)

    def close(self) -> None: ...


def _train(engine: str, images: Path, folder: Path) -> Seen:
    """The real loop with real images, batch norm and LARS, in fp32 and without augmentation."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = tests.world(rank, ranks)
    recipe = parse_recipe(
        "test",
        tables(
            ranks=4, global_batch=32, epochs=STEPS // 2, label_smoothing=0.1,
            model={"kind": "resnet18", "zero_init_last_gamma": True},
            data={"dataset": "digits", "loader": "dali", "image_size": 32, "resize": 32, "augment": False},
            optim={"kind": "lars", "lr": 0.6, "weight_decay": 5e-5},
            schedule={"kind": "polynomial", "warmup_epochs": 1},
            sync={"kind": engine, "wire": "fp32"},
        ),
    )  # fmt: skip
    seen = Seen()
    train_job(Job("test", recipe, split_batch(recipe, ranks), images, folder), world, sinks=[seen])
    return seen
