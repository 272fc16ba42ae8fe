"""The number of ranks decides how a run is computed, not what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from tests.conftest import make_images, tables
from tests.e2e.command import events_of, train_here
from tests.ranks import run

STEPS, IMAGES = 6, 40


@pytest.mark.weekly
def test_one_two_and_four_ranks_agree_in_every_loss_and_in_accuracy(tmp_path: Path):
    """Batch-norm statistics included, in training and in evaluation: micro-batches do not depend on the ranks.

    What is left is the order of additions, which training a network amplifies, and on images with flat areas
    (ties in max-pooling) quickly: hence smooth images.
    """
    images = make_images(tmp_path / "images", train=64, val=IMAGES)
    (alone,), (both, _), (four, *_) = (
        run(ranks, _train, engine, images, tmp_path / str(ranks), fresh=True)
        for ranks, engine in ((1, "lazy"), (2, "lazy"), (4, "hybrid"))
    )
    losses, correct = alone
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0], "it learns"
    for other in (both, four):
        assert other[0] == pytest.approx(losses, rel=1e-3)
        assert other[1] == pytest.approx(correct, abs=2), "images, after each epoch"


def _train(engine: str, images: Path, folder: Path) -> tuple[list[float], list[float]]:
    """The real loop with real images, batch norm and LARS, in fp32 and without augmentation."""
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
    outcome = train_here(Job("test", recipe, split_batch(recipe, dist.get_world_size()), images, folder))
    assert outcome.status == "finished"
    losses = [event["loss"] for event in events_of(folder, "train")]
    return losses, [event["top1"] / 100 * IMAGES for event in events_of(folder, "eval")]
