"""The number of ranks decides how a run is computed, not what it learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.data.dataset import open_dataset
from imagenet_fast.ranks.world import World
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.reading import parse_recipe
from imagenet_fast.record import Event, Outcome, Record
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.loop import train
from tests.conftest import make_pictures, tables
from tests.spawning import run

ENGINES = ("hybrid",)
STEPS = 10


def test_one_and_four_ranks_agree_in_the_loss_of_every_step(tmp_path: Path):
    """Batch-norm statistics included, since micro-batches do not depend on the number of ranks.

    What is left is the order of additions, which training a network amplifies, and on pictures with flat areas
    (ties in max-pooling) quickly: hence smooth pictures.
    """
    pictures = make_pictures(tmp_path / "pictures", train=80, val=7)
    (alone,) = run(1, _losses, ["lazy"], pictures, tmp_path / "one")
    together, *_ = run(4, _losses, ENGINES, pictures, tmp_path / "four")
    expected = alone["lazy"]
    assert len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0], "it learns"
    for engine in ENGINES:
        assert together[engine] == pytest.approx(expected, rel=1e-3), engine


class Losses:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def write(self, event: Event) -> None:
        if event.name == "train":
            self.seen.append(event.values["loss"])

    def close(self) -> None: ...


def _losses(engines: Sequence[str], pictures: Path, folder: Path) -> dict[str, list[float]]:
    """The real loop with real pictures, batch norm and LARS, in fp32 and without augmentation."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, rank, ranks, torch.device("cpu"))
    by_engine = {}
    for engine in engines:
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
        losses, clock = Losses(), Clock()
        outcome = Outcome("failed", "test", engine, ranks, 32)
        job = Job("test", recipe, split_batch(recipe, ranks), pictures, folder)
        dataset = open_dataset(recipe.data, pictures, job.batching, rank, ranks, world.device, recipe.seed)
        train(job, dataset, world, clock, Record(clock.run_s, [losses]), outcome)
        by_engine[engine] = losses.seen
    return by_engine
