"""Ranks whose nodes hold other images refuse each other, in training and in evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tests
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.training.evaluation import evaluate_weights
from imagenet_fast.training.trainer import Trainer
from tests.ranks import run
from tests.training.jobs import job_of

DATA = {"dataset": "imagenet", "loader": "threads", "image_size": 32, "resize": 40}


def first_of(folder: Path) -> Path:
    return next(folder.iterdir())


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image is lost": (lambda root: first_of(root / "train/class1").unlink(), "39 training images for 40"),
    "a node has its copy elsewhere": (lambda root: None, ""),
    "a validation image is lost": (lambda root: first_of(root / "val/class1").unlink(), "6 validation images for 7"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_images_are_refused_wherever_they_lie(case: str, image_dir: Path, tmp_path: Path):
    shutil.copytree(image_dir, other := tmp_path / "other")
    change, difference = CHANGES[case]
    change(other)
    expected = f"rank 1 has other images than rank 0: {difference}; copy the same " if difference else ""
    for trained, evaluated in run(3, _told, image_dir, other):
        assert trained.startswith(expected)
        assert bool(trained) == bool(expected)
        assert evaluated == trained or "validation" not in case


def _told(sound: Path, other: Path) -> tuple[str, str]:
    """The refusals of training and of an evaluation, on one rank: rank 1 reads another directory."""
    world = tests.world()
    root = other if world.rank == 1 else sound
    job = job_of(images=root, reference_ranks=3, global_batch=12, data=DATA)
    trainer, evaluation = Trainer(job, world), Evaluation("test", job.recipe, job.batching, Path("none"), root)
    return _refusal(trainer.open_data), _refusal(lambda: evaluate_weights(evaluation, world))


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    return ""
