"""Ranks whose nodes hold other images refuse each other, in training and in evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tests
from imagenet_fast.errors import UserError
from imagenet_fast.launch.evaluate import judge
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.training.trainer import Trainer
from tests.ranks import run
from tests.training.jobs import job_of

DATA = {"dataset": "imagenet", "loader": "folder", "image_size": 32, "resize": 40}


def lose_an_image(root: Path) -> None:
    next((root / "train/class1").iterdir()).unlink()


def rename_an_image(root: Path) -> None:
    image = next((root / "train/class1").iterdir())
    image.rename(image.with_name("other.jpg"))


def rename_a_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "zebra")


def lose_a_validation_image(root: Path) -> None:
    next((root / "val/class1").iterdir()).unlink()


def copy_alone(root: Path) -> None:
    """Each node may hold its copy elsewhere."""


CHANGES: dict[Callable[[Path], None], str] = {
    lose_an_image: "39 training images for 40",
    rename_an_image: "other names or labels of its training images",
    rename_a_class: "the class 'zebra' for 'class1'",
    copy_alone: "",
    lose_a_validation_image: "6 validation images for 7",
}


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_other_images_are_refused_wherever_they_lie(change: Callable[[Path], None], image_dir: Path, tmp_path: Path):
    shutil.copytree(image_dir, other := tmp_path / "other")
    change(other)
    expected = f"rank 1 has other images than rank 0: {CHANGES[change]}; copy the same " if CHANGES[change] else ""
    for trained, evaluated in run(3, _told, image_dir, other):
        assert trained.startswith(expected)
        assert bool(trained) == bool(expected)
        assert evaluated == trained or change is not lose_a_validation_image


def _told(sound: Path, other: Path) -> tuple[str, str]:
    """The refusals of training and of an evaluation, on one rank: rank 1 reads another directory."""
    world = tests.world()
    root = other if world.rank == 1 else sound
    job = job_of(images=root, ranks=3, global_batch=12, data=DATA)
    trainer, evaluation = Trainer(job, world), Evaluation("test", job.recipe, job.batching, Path("none"), root)
    return _refusal(trainer.open_data), _refusal(lambda: judge(evaluation, world))


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    return ""
