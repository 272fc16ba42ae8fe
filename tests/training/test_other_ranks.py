"""A run that goes on over other numbers of ranks: each image of an epoch once, and the same weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.data.loaders import Batch
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.run_lock import CHECKPOINTS
from imagenet_fast.training.state import TrainState, joined
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.ranks import run

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


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(72, 10),
    )  # fmt: skip


def trained(folder: Path, stop: int) -> tuple[Seen, dict[str, Tensor]]:
    """Begin in ``folder``, or go on with what is there, and save after ``stop`` steps; what this rank saw meanwhile."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = tests.world(rank, ranks)
    changes = {"data__train_images": IMAGES, "global_batch": BATCH, "micro_batch": 1, "eval_every": EPOCHS}
    recipe = parse_recipe("test", tables(epochs=EPOCHS, **changes))
    job = Job("test", recipe, split_batch(recipe, ranks), None, folder, resume=True)
    folder.mkdir(exist_ok=True)
    trainer = Trainer(job, world)
    trainer.open_data()
    trainer.build(small_network())
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


def test_another_schedule_of_a_pipeline_cuts_the_model_elsewhere(tmp_path: Path):
    """Interleaved, each rank holds two stages that do not follow one another, with batch norms of its own."""
    one, another = {"pipeline": 2, "micro_batches": 2}, {"pipeline": 2, "micro_batches": 2, "schedule": "interleaved"}
    for before, after in ((one, another), (another, one)):
        folder = tmp_path / before.get("schedule", "1f1b")
        saved, *_ = run(2, _in_a_pipeline, folder, before, 2)
        resumed, *_ = run(2, _in_a_pipeline, folder, after, 2)
        assert saved.keys() == resumed.keys()
        for name, tensor in saved.items():
            torch.testing.assert_close(resumed[name], tensor, msg=name)


def _in_a_pipeline(folder: Path, parallel: dict[str, Any], stop: int) -> dict[str, Tensor]:
    """Train to step ``stop`` and save, or resume there; the weights and statistics of the whole model."""
    rank = dist.get_rank()
    world = tests.world(rank, 2)
    recipe = parse_recipe("test", tables(global_batch=8, data__train_images=32, parallel=parallel))
    folder.mkdir(exist_ok=True)
    trainer = Trainer(Job("test", recipe, split_batch(recipe, 2), None, folder, resume=True), world)
    trainer.open_data()
    trainer.build()
    state = trainer.state
    store = dist.distributed_c10d._get_default_store()
    with CheckpointWriter(folder / CHECKPOINTS, world, store) as writer:
        manager = CheckpointManager(trainer.job, world, writer, 32, lambda: False)
        trainer.checkpoints = StopAfter(stop, manager)
        if state.step < stop:
            trainer.train()
        manager.close()
    state.settle()
    state.level_statistics()
    weights = {name: tensor.clone() for name, tensor in state.whole().state_dict().items()}
    state.sync.close()
    return weights


def test_the_checkpoint_itself_is_not_kept_in_memory(tmp_path: Path):
    run(1, trained, tmp_path / "run", 3)
    assert run(1, _kept_after_resuming, tmp_path / "run") == [({"saved_at"}, 0)]


def _kept_after_resuming(folder: Path) -> tuple[set[str], int]:
    world = tests.world(0, 1)
    changes = {"data__train_images": IMAGES, "global_batch": BATCH, "micro_batch": 1, "eval_every": EPOCHS}
    recipe = parse_recipe("test", tables(epochs=EPOCHS, **changes))
    trainer = Trainer(Job("test", recipe, split_batch(recipe, 1), None, folder, resume=True), world)
    trainer.open_data()
    assert trainer.resumed_from is not None
    loaded = [weakref.ref(tensor) for tensor in trainer.resumed_from.shared["model"].values()]
    trainer.build(small_network())
    gc.collect()
    trainer.state.sync.close()
    return set(trainer.resumed_from.shared), sum(ref() is not None for ref in loaded)


def test_what_ranks_have_left_is_added_up_one_rank_after_another():
    """A GPU could not hold the residuals of hundreds of ranks at once."""
    places = {"weight": (0, 4)}
    living: list[weakref.ref[Tensor]] = []
    most = 0

    def parts() -> Iterator[dict[str, Any]]:
        nonlocal most
        for rank in range(8):
            residual = torch.full((5,), float(rank))
            living.append(weakref.ref(residual))
            most = max(most, sum(ref() is not None for ref in living))
            engine = {"step": 3, "places": places, "residual": residual, "left": None, "memory": {}}
            yield {
                "sync": {"engine": engine, "elected": "", "loss_scale": None}, "sent_bytes": 5, "average": None,
                "averaged": None, "buffers": {"mean": torch.full((2,), rank / 2), "count": torch.tensor(rank)},
            }  # fmt: skip
            del residual, engine

    own = joined(parts(), sharded=False)
    assert most <= 2
    assert own["sync"]["engine"]["residual"].tolist() == [3.5] * 5
    assert own["buffers"]["mean"].tolist() == [1.75] * 2
    assert own["buffers"]["count"] == 7
