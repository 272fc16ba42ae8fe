"""A rank says in which phase of a step it is, and that it waits wherever it waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.data.loaders import build_loaders
from imagenet_fast.distributed.heartbeat import Phase, here
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.train_step import build_step
from tests.conftest import tables
from tests.ranks import run

LAZY = {"kind": "lazy", "wire": "fp32", "threshold_mb": 1}
DEAR = {"kind": "dear", "wire": "fp32", "bucket_mb": 1}
PIPELINE: dict[str, Any] = {"pipeline": 2, "micro_batches": 2}
IN_ORDER: list[Phase] = ["data", "forward", "backward"]


def test_a_step_goes_through_its_phases_in_order():
    """Once the engine has learnt what it wants to know."""
    (lazy, accumulated, dear, first), (*_, last) = run(2, _phases)
    assert lazy == [*IN_ORDER, "sync", "update"]
    assert accumulated == [*IN_ORDER, *IN_ORDER, "sync", "update"]
    assert dear[:4] == ["data", "forward", "sync", "forward"], "a layer's gradients are awaited before it is read"
    assert dear[-3:] == ["backward", "sync", "update"]
    for stage in (first, last):
        assert stage[0] == "data"
        assert stage[-2:] == ["sync", "update"]
        assert stage.count("forward") == stage.count("backward") == 2
        assert stage[1::2] == ["sync"] * len(stage[1::2]), "a stage waits for its neighbour between the passes"


def _phases() -> list[list[Phase]]:
    return [
        _last_step(2, sync=LAZY),
        _last_step(2, sync=LAZY, micro_batch=2),
        _last_step(8, sync=DEAR),
        _last_step(2, sync=LAZY, parallel=PIPELINE),
    ]


def _last_step(steps: int, **changes: Any) -> list[Phase]:
    """Return the phases that the last of so many enters, each once in a row."""
    rank = torch.distributed.get_rank()
    world = tests.world(rank, 2)
    recipe = parse_recipe("test", tables(global_batch=8, data__train_images=16, **changes))
    batching = split_batch(recipe, 2)
    dataset = build_loaders(recipe.data, None, batching, rank, 1, world.device, recipe.seed)
    take_step = build_step(recipe, batching, build_initial_model(recipe, dataset.classes, world), world, 4)
    entered: list[Phase] = []
    enter = here.enter

    def noted(phase: Phase, step: int | None = None) -> None:
        entered.append(phase)
        enter(phase, step)

    here.enter = noted  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            entered.clear()
            take_step(dataset.train, 0.1)
    finally:
        here.enter = enter  # type: ignore[method-assign]
    return [phase for phase, _ in groupby(entered)]


def test_whoever_waits_for_a_slow_disk_says_so_all_the_time(tmp_path: Path):
    """Else the last checkpoint on a slow disk would count as a hang, and a resumed run would end at the same place."""
    (said,) = run(1, _saved_to_a_slow_disk, tmp_path)
    assert said >= 4, "once a second, for three"


def _saved_to_a_slow_disk(folder: Path) -> int:
    world = tests.world(0, 1)
    recipe = parse_recipe("test", tables(ranks=1, sync=LAZY))
    batching = split_batch(recipe, 1)
    state = build_step(recipe, batching, build_initial_model(recipe, 10, world), world, 4).state
    entered: list[Phase] = []
    with CheckpointWriter(folder, world) as writer, pytest.MonkeyPatch.context() as patch:
        manager = CheckpointManager(Job("test", recipe, batching, None, folder), world, writer, 64, lambda: False)
        patch.setattr(os, "fsync", _slow_once(os.fsync, 3.0))
        manager(state, evaluated=True)
        patch.setattr(here, "enter", lambda phase, step=None: entered.append(phase))
        assert not manager.finish(state, True)
        manager.close()
    assert manager.saved_step == state.step
    return entered.count("checkpoint")


def _slow_once(fsync: Callable[[int], None], seconds: float) -> Callable[[int], None]:
    slept: list[float] = []

    def slow(descriptor: int) -> None:
        if not slept:
            slept.append(seconds)
            time.sleep(seconds)
        fsync(descriptor)

    return slow
