"""Whoever waits is as alive as the one it waits for: a rank that goes on ends nobody, however long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tests
from imagenet_fast.checkpoint import folder as folders
from imagenet_fast.data.index import map_in_order
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.reductions import first_of_node
from imagenet_fast.distributed.watchdog import watching_ranks
from imagenet_fast.recipe.schema import Timeout
from imagenet_fast.training import checkpoint_manager, resume
from tests.checkpoint.trees import saved
from tests.ranks import run
from tests.training.jobs import job_of
from tests.training.test_evaluation import EXACT, Guess, data_of, evaluate

LIMIT_S, TIMES = 1.5, 10  # the slow rank takes half of the limit, so many times


def slowly(*_: Any) -> None:
    time.sleep(LIMIT_S / 2)


def evaluating(folder: Path) -> None:
    """One rank is slower than the other."""
    world, model = tests.world(), Guess()
    model.register_forward_pre_hook(slowly) if world.rank == 1 else None
    assert evaluate(model, data_of(4 * TIMES, 2), EXACT, world).images == 4 * TIMES


def looking_through_data(folder: Path) -> None:
    """The first rank of a node lists it, then the other has an index."""
    with first_of_node(tests.world()):
        if tests.world().is_local_main:
            list(map_in_order(slowly, range(16 * TIMES)))  # in 16 threads)


def verifying(folder: Path) -> None:
    """A checkpoint of many ranks, of which each reads a part."""
    read, files = folders._content, []

    def reading(path: Path, expected: Any) -> bytes:
        files.append(path.name)
        slowly()
        return read(path, expected)

    with patch.object(folders, "_content", reading):
        found = resume._newest(folder, tests.world())
    assert (found is not None) == tests.world().is_main
    assert len(files) == (TIMES // 2 + 1 if found else TIMES // 2)


def writing(folder: Path) -> None:
    """Final weights, to a slow disk."""
    model = torch.nn.Linear(2, 2)
    state = SimpleNamespace(settle=bool, whole=lambda: model)
    with (
        patch.object(checkpoint_manager, "write_weights", lambda *_: time.sleep(LIMIT_S * TIMES / 2)),
        patch.object(checkpoint_manager, "check_locked"),
    ):
        checkpoint_manager.save_final_weights(state, job_of(folder), [], tests.world(), None)


@pytest.mark.ci
@pytest.mark.parametrize("doing", [evaluating, looking_through_data, verifying, writing])
def test_a_rank_that_goes_on_ends_nobody(doing: Callable[[Path], None], tmp_path: Path):
    saved(tmp_path, 1)
    (only,) = tmp_path.iterdir()
    manifest, part = folders.read_manifest(only), only / "rank-00000.safetensors"
    for rank in range(1, TIMES):
        (only / folders.part_name(rank)).write_bytes(part.read_bytes())
    sums = manifest.files | {folders.part_name(rank): manifest.files[part.name] for rank in range(TIMES)}
    folders.Manifest(**{**dict(manifest), "files": sums, "world": TIMES}).write(only)
    assert run(2, _watched, doing, tmp_path, fresh=True) == ["done"] * 2


def _watched(doing: Callable[[Path], None], folder: Path) -> str:
    with (
        patch("imagenet_fast.distributed.groups.SLACK_S", 0.5),
        watching_ranks(Timeout(first_step_s=LIMIT_S, step_s=LIMIT_S), print),
    ):
        time.sleep(0.7)  # until the limits of collectives are set
        here.enter("start", 0)
        doing(folder)
    return "done"
