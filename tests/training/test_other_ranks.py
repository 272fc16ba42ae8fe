"""A run that goes on over other numbers of ranks: each image of an epoch once, and the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.data.loaders import Batch
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.run_lock import CHECKPOINTS
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.spawning import run

IMAGES, BATCH, EPOCHS = 60, 12, 2  # five steps an epoch
STEPS = EPOCHS * IMAGES // BATCH

Seen = list[tuple[int, list[int]]]
"""Of each step, the images that a rank trained on."""


def test_resume_on_2_4_3_ranks_sees_every_image_once(tmp_path: Path):
    """The first epoch is interrupted after its third step, and so is the second."""
    straight, expected = zip(*run(2, trained, tmp_path / "straight", STEPS), strict=True)
    parts, weights = [], {}
    for ranks, stop in ((2, 3), (4, 8), (3, STEPS)):
        seen, found = zip(*run(ranks, trained, tmp_path / "run", stop), strict=True)
        parts.append(seen)
        weights = found[0]
    for epoch in range(EPOCHS):
        steps = range(1 + epoch * STEPS // EPOCHS, 1 + (epoch + 1) * STEPS // EPOCHS)
        assert sorted(used([straight], steps)) == list(range(IMAGES))
        assert sorted(used(parts, steps)) == list(range(IMAGES))
    for step in range(1, STEPS + 1):
        assert sorted(used(parts, range(step, step + 1))) == sorted(used([straight], range(step, step + 1)))
    assert {len(images) for ranks in parts[1] for _, images in ranks} == {BATCH // 4}
    assert weights.keys() == expected[0].keys()
    for name, tensor in weights.items():  # sums are rounded in another order, and nothing else differs
        torch.testing.assert_close(tensor, expected[0][name], rtol=1e-3, atol=1e-4)


def used(parts: list[tuple[Seen, ...]], steps: range) -> list[int]:
    return [image for ranks in parts for seen in ranks for step, images in seen if step in steps for image in images]


class StopAfter:
    """Saves once, after a step, and has all ranks stop there."""

    def __init__(self, step: int, manager: CheckpointManager) -> None:
        self.step, self.manager, self.asked = step, manager, lambda: False

    def __call__(self, state: TrainState, evaluated: bool | None) -> bool:
        if state.step == self.step:
            self.manager(state, evaluated=True)
        return state.step == self.step


def trained(folder: Path, stop: int) -> tuple[Seen, dict[str, Tensor]]:
    """Begin in ``folder``, or go on with what is there, and save after ``stop`` steps; what this rank saw meanwhile."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = DistContext(rank, ranks, rank, ranks, torch.device("cpu"))
    changes = {"data__train_images": IMAGES, "global_batch": BATCH, "micro_batch": 1, "eval_every": EPOCHS}
    recipe = parse_recipe("test", tables(epochs=EPOCHS, **changes))
    job = Job("test", recipe, split_batch(recipe, ranks), None, folder, resume=True)
    folder.mkdir(exist_ok=True)
    trainer = Trainer(job, world)
    trainer.open_data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(72, 10),
    )  # fmt: skip
    trainer.build(model)
    state = trainer.state
    seen: Seen = []
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def batches() -> Iterator[Batch]:
        """In the order that a loader is given."""
        for _, numbers, *_ in trainer.data.train_order:
            if not seen or seen[-1][0] != state.step + 1:
                seen.append((state.step + 1, []))
            seen[-1][1].extend(numbers.tolist())
            yield images[numbers], torch.from_numpy(numbers) % 10

    trainer.data = replace(trainer.data, train=batches())
    store = dist.distributed_c10d._get_default_store()
    with CheckpointWriter(folder / CHECKPOINTS, world, store) as writer:
        trainer.checkpoints = StopAfter(stop, CheckpointManager(job, world, writer, IMAGES, lambda: False))
        trainer.train()
        trainer.checkpoints.manager.close()
    state.settle()
    weights = {name: tensor.clone() for name, tensor in state.whole().state_dict().items()}
    state.sync.close()
    return seen, weights
