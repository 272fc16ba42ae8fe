"""A rank says in which phase of a step it is, and that it waits wherever it waits."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.data.build import Loaders, build_loaders
from imagenet_fast.distributed.heartbeat import Phase, here
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.training_step import TrainingStep, build_step
from tests.ranks import run, with_ranks
from tests.training.jobs import job_of

LAZY = {"kind": "lazy", "wire": "fp32", "threshold_mb": 1}
DEAR = {"kind": "dear", "wire": "fp32", "bucket_mb": 1}
IN_ORDER: list[Phase] = ["data", "forward", "backward"]


def phases(steps: int, **changes: Any) -> list[list[Phase]]:
    """Of the last of so many steps, by which the engine has learnt what it wants to know, on two ranks."""
    return run(2, partial(_last_step, steps, **changes))


def test_a_step_goes_through_its_phases_in_order():
    once, twice = ([*IN_ORDER, "sync", "update"], [*IN_ORDER, *IN_ORDER, "sync", "update"])
    assert phases(2, sync=LAZY) == [once, once]
    assert phases(2, sync=LAZY, micro_batch=2) == [twice, twice]


def test_a_deferring_engine_waits_amid_the_forward():
    for entered in phases(8, sync=DEAR):
        assert entered[:4] == ["data", "forward", "sync", "forward"], "gradients are awaited before a layer is read"
        assert entered[-3:] == ["backward", "sync", "update"]


def test_a_stage_waits_for_its_neighbour_between_the_passes():
    for stage in phases(2, sync=LAZY, parallel={"pipeline": 2, "micro_batches": 2}):
        assert stage[0] == "data"
        assert stage[-2:] == ["sync", "update"]
        assert stage.count("forward") == stage.count("backward") == 2
        assert stage[1::2] == ["sync"] * len(stage[1::2])


def begun(**changes: Any) -> tuple[TrainingStep, Loaders, Job]:
    world, job = tests.world(), job_of(global_batch=8, data__train_images=16, **changes)
    dataset = build_loaders(job.recipe.data, None, job.batching, world.rank, 1, world.device, job.recipe.seed)
    return build_step(job.recipe, job.batching, build_initial_model(job.recipe, 10, world), world, 4), dataset, job


def _last_step(steps: int, **changes: Any) -> list[Phase]:
    """Return the phases that it enters, each once in a row."""
    take_step, dataset, _ = begun(**changes)
    with patch.object(here, "enter", wraps=here.enter) as enter:
        for _ in range(steps):
            enter.reset_mock()
            take_step(dataset.train, 0.1)
    take_step.state.settle()
    take_step.state.sync.close()
    return [phase for phase, _ in groupby(call.args[0] for call in enter.call_args_list)]


@pytest.mark.ci
@with_ranks(2)
def test_whoever_waits_for_a_slow_disk_says_so_all_the_time(tmp_path: Path):
    """Else the last checkpoint on a slow disk would count as a hang, and a resumed run would end at the same place."""
    take_step, _, job = begun(sync=LAZY)
    state, world = take_step.state, tests.world()
    entered: list[Phase] = []
    store = dist.distributed_c10d._get_default_store()
    with CheckpointWriter(tmp_path, world, store) as writer, pytest.MonkeyPatch.context() as monkeypatch:
        manager = CheckpointManager(job, world, writer, {}, lambda: False)
        fsync, once = os.fsync, iter([3.0])
        monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(next(once, 0.0)), fsync(descriptor)))
        manager.save(state, evaluated=True)
        monkeypatch.setattr(here, "enter", lambda phase, step=None: entered.append(phase))
        assert not manager.finish(state, True)
        manager.close()
    assert manager.saved_step == state.step
    state.sync.close()
    assert entered.count("checkpoint") >= 4, "once a second, for three"
