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


@pytest.mark.parametrize(
    ("status", "wait_pct", "rank", "advised"),
    [
        ("finished", 5.2, 0, True), ("preempted", 80.0, 0, True), ("finished", 5.0, 0, False),
        ("finished", None, 0, False), ("failed", 80.0, 0, False), ("finished", 80.0, 1, False),
    ],
    ids=["waited", "stopped", "bearable", "unmeasured", "failed", "another rank"],
)  # fmt: skip
def test_a_run_that_waited_long_is_told_what_may_help_on_this_node(
    status: str, wait_pct: float | None, rank: int, advised: bool,
    make_recipe: Callable[..., Recipe], image_dir: Path, tmp_path: Path,
):  # fmt: skip
    recipe = make_recipe(data={"dataset": "imagenet", "loader": "dali", "image_size": 32, "resize": 32})
    job = Job("test", recipe, split_batch(recipe, 2), image_dir, tmp_path)
    ended = replace(RunResult("failed", "test", "lazy", 2, 16), status=status, data_wait_pct=wait_pct)
    advice = final_advice(job, ended, tests.world(rank, 2))
    assert bool(advice) == advised
    if advised:
        assert advice[0].startswith(f"Waited for data {wait_pct:.0f} % of training: a rank reads with dali")
        assert advice[1].startswith("  --set data.loader=folder")
    assert final_advice(replace(job, data=tmp_path / "gone"), ended, tests.world(rank, 2)) == []
