"""Which runs end with advice on their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tests
from imagenet_fast.metrics import RunResult
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.trainer import final_advice

WORLD = tests.world(0, 2)


@pytest.fixture
def job(make_recipe: Callable[..., Recipe], image_dir: Path, tmp_path: Path) -> Job:
    recipe = make_recipe(data={"dataset": "imagenet", "loader": "dali", "image_size": 32, "resize": 32})
    return Job("test", recipe, split_batch(recipe, 2), image_dir, tmp_path)


def ended(status: str, wait_pct: float | None) -> RunResult:
    return replace(RunResult("failed", "test", "lazy", 2, 16), status=status, data_wait_pct=wait_pct)


def test_a_run_that_waited_is_told_what_may_help_on_this_node(job: Job):
    first, *settings = final_advice(job, ended("finished", 5.2), WORLD)
    assert first.startswith("Waited for data 5 % of training: a rank reads with dali")
    assert settings[0].startswith("  --set data.loader=folder")
    assert final_advice(job, ended("preempted", 80.0), WORLD)


@pytest.mark.parametrize(
    ("status", "wait_pct"),
    [("finished", 5.0), ("finished", None), ("failed", 80.0)],
    ids=["bearable", "unmeasured", "failed"],
)
def test_no_advice_without_long_data_waits(status: str, wait_pct: float | None, job: Job):
    assert final_advice(job, ended(status, wait_pct), WORLD) == []


def test_no_advice_on_other_ranks_or_without_images(job: Job, make_recipe: Callable[..., Recipe], tmp_path: Path):
    starved = ended("finished", 80.0)
    assert final_advice(job, starved, replace(WORLD, rank=1, local_rank=1)) == []
    assert final_advice(replace(job, recipe=make_recipe(), data=None), starved, WORLD) == []
    assert final_advice(replace(job, data=tmp_path / "gone"), starved, WORLD) == []
