"""Whoever waits is as alive as the one it waits for: a rank that goes on ends nobody, however long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tests
from imagenet_fast.checkpoint import folder as folders
from imagenet_fast.data.index import map_in_order
from imagenet_fast.distributed.messages import first_of_node
from imagenet_fast.distributed.watchdog import watching_ranks
from imagenet_fast.models import weights
from imagenet_fast.recipe.schema import Timeout
from imagenet_fast.training import checkpoint_manager, resume
from tests.ranks import run
from tests.training.jobs import job_of
from tests.training.test_evaluation import EXACT, Guess, data_of, evaluate

LIMIT_S, TIMES = 1.5, 8  # a rank takes half of the limit, so many times


def slowly(*_: Any) -> None:
    time.sleep(LIMIT_S / 2)


def evaluate_unlike_fast() -> None:
    world, model = tests.world(), Guess()
    if world.rank == 1:
        model.register_forward_pre_hook(slowly)
    assert evaluate(model, data_of(4 * TIMES, 2), EXACT, world).images == 4 * TIMES


def look_through_data() -> None:
    with first_of_node(tests.world()):
        if tests.world().is_local_main:
            list(map_in_order(slowly, range(16 * TIMES)))  # in 16 threads


def verify_a_checkpoint() -> None:
    """Rank 0 is slower, and has read the half that is its share when the other has."""
    read: list[int] = []

    def damaged_part(folder: Path, share: slice) -> None:
        for part in range(2 * TIMES)[share]:
            slowly() if tests.world().is_main else None
            folders.here.move()
            read.append(part)

    with (
        patch.object(resume, "damaged_part", damaged_part),
        patch.object(resume, "newest", lambda root, check: check(root / "step-1")),
    ):
        resume._newest(Path("run"), tests.world())
    assert len(read) == TIMES


def write_weights() -> None:
    """Of 64 kB, in pieces."""
    state, moved = SimpleNamespace(settle=bool, whole=lambda: torch.nn.Linear(128, 127)), weights.here.move
    with (
        TemporaryDirectory() as folder,
        patch.object(checkpoint_manager, "check_locked"),
        patch.object(weights, "_PIECE", 2**16 // TIMES),
        patch.object(weights.here, "move", lambda: (slowly(), moved())),
    ):
        checkpoint_manager.save_final_weights(state, job_of(Path(folder)), [], tests.world(), None)


@pytest.mark.ci
@pytest.mark.parametrize("do", [evaluate_unlike_fast, look_through_data, verify_a_checkpoint, write_weights])
def test_a_rank_that_goes_on_ends_nobody(do: Callable[[], None]):
    assert run(2, _watched, do, fresh=True) == ["done"] * 2


def _watched(do: Callable[[], None]) -> str:
    dist.set_timeout(timedelta(seconds=LIMIT_S + 0.5), dist.group.WORLD)
    with watching_ranks(Timeout(first_step_s=LIMIT_S, step_s=LIMIT_S), print):
        do()
    return "done"
