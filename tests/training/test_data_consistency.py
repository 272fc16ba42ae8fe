"""Ranks whose nodes hold other images refuse each other, in training and in evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import tests
from imagenet_fast.data.bad_images import QUARANTINE, quarantine_text
from imagenet_fast.errors import UserError
from imagenet_fast.launch.evaluate import judge
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Evaluation, Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.ranks import run

DATA = {"dataset": "imagenet", "loader": "folder", "image_size": 32, "resize": 40}


def lose_an_image(root: Path) -> None:
    next((root / "train/class1").iterdir()).unlink()


def rename_an_image(root: Path) -> None:
    image = next((root / "train/class1").iterdir())
    image.rename(image.with_name("other.jpg"))


def rename_a_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "zebra")


def quarantine_an_image(root: Path) -> None:
    image = next((root / "train/class1").iterdir())
    (root / QUARANTINE).write_text(quarantine_text({f"train/class1/{image.name}": "damaged"}))


def lose_a_validation_image(root: Path) -> None:
    next((root / "val/class1").iterdir()).unlink()


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (lose_an_image, "39 training images for 40"),
    (rename_an_image, "other names or labels of its training images"),
    (rename_a_class, "the class 'zebra' for 'class1'"),
    (quarantine_an_image, "39 training images for 40"),
    (lose_a_validation_image, "6 validation images for 7"),
]


def test_ranks_with_other_images_are_refused(image_dir: Path, tmp_path: Path):
    roots = []
    for change, _ in CHANGES:
        roots.append(tmp_path / change.__name__)
        shutil.copytree(image_dir, roots[-1])
        change(roots[-1])
    for told in run(3, _told, image_dir, roots):
        assert told.pop("equal") == "", "each node may hold its copy elsewhere"
        assert told.pop("evaluated") == told["lose_a_validation_image"]
        for change, what in CHANGES:
            assert told[change.__name__].startswith(f"rank 1 has other images than rank 0: {what}; copy the same ")


def _told(sound: Path, roots: list[Path]) -> dict[str, str]:
    """The refusals of one rank: rank 1 reads another directory."""
    rank = dist.get_rank()
    world = tests.world(rank, 3)
    recipe = parse_recipe("test", tables(ranks=3, global_batch=12, data=DATA))
    batching, told = split_batch(recipe, 3), {}
    for root in (sound, *roots):
        trainer = Trainer(Job("test", recipe, batching, root if rank == 1 else sound, Path("unused")), world)
        told["equal" if root == sound else root.name] = _refusal(trainer.open_data)
    evaluation = Evaluation("test", recipe, batching, Path("none"), roots[-1] if rank == 1 else sound)
    told["evaluated"] = _refusal(lambda: judge(evaluation, world))
    return told


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    return ""
