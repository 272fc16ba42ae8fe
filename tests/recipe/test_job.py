"""A job that is handed to ranks comes back as it was; the recipes that a run may resume with."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.launch.job_setup import recipe_of
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.job import Evaluation, Job, differences, read_job, recipe_tables, write_job
from imagenet_fast.recipe.load import load_recipe, parse_recipe, to_toml
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import tables

STRANGE = Path(os.fsdecode(b"/runs/caf\xe9 \n'\"$x"))
"""Not in UTF-8, on two lines."""
RECIPE = parse_recipe("test", tables(sync={"kind": "lazy", "threshold_mb": math.inf}))
PLAIN = Job("test", RECIPE, Batching(3, 5, 2), None, Path("/runs/a"))
JOBS = {
    "plain": PLAIN,
    "full": Job("test", RECIPE, Batching(3, 5, 2), STRANGE, STRANGE, "a", True, STRANGE, True, True, ("a", "b"), True),
    "evaluation": Evaluation("test", RECIPE, Batching(3, 5, 1), STRANGE, None),
    "full evaluation": Evaluation("test", RECIPE, Batching(3, 5, 1), STRANGE, STRANGE, STRANGE),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_is_read_back_as_it_was_written(job: Job | Evaluation, tmp_path: Path):
    write_job(job, tmp_path / "job.json")
    assert read_job(tmp_path / "job.json", type(job)) == job


def test_a_stopped_run_is_resumed_by_its_directory_unless_it_was_before(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = replace(PLAIN, folder=tmp_path / "runs" / "my run")
    assert job.resuming == "the same train command with --resume 'runs/my run'"
    assert PLAIN.resuming == "the same train command with --resume /runs/a"
    assert replace(job, resume=True).resuming == "the same command"
    tmp_path.rmdir()
    assert job.resuming.endswith(f"'{tmp_path}/runs/my run'"), "also where the working directory is gone"


def test_nodes_that_start_from_different_weights_disagree():
    starts = [None, Path("/a/w.pth"), Path("/b/w.pth"), Path("/a/other.pth")]
    fresh, here, there, other = (replace(PLAIN, init_from=start).agreed() for start in starts)
    assert here == there, "each may keep them where it likes"
    assert fresh != here != other


DATA = {"dataset": "digits", "loader": "threads", "image_size": 48, "resize": 56}
LARS = {"kind": "lars", "lr": 1, "weight_decay": 0}


def recipe(**changes: Any) -> Recipe:
    return parse_recipe("test", tables(**{"data": dict(DATA), "optim": dict(LARS)} | changes))


def test_differences_name_keys_that_may_not_change():
    begun = recipe_tables(recipe(epochs=3))
    other = recipe(data=DATA | {"workers": 7, "flip": False}, epochs=9)
    assert differences(begun, other) == ["data.flip (true, now false)"]


def test_a_run_goes_on_by_its_own_recipe_though_the_shipped_one_has_changed(tmp_path: Path):
    own = load_recipe("alexnet-8gpu", overrides=["optim.biases=plain"])
    job = Job("alexnet-8gpu", own, split_batch(own, 8), None, tmp_path)
    write_job(job, tmp_path / "job.json")
    (tmp_path / "recipe.toml").write_text(to_toml(own))
    assert recipe_of(tmp_path, None) == ("alexnet-8gpu", own, job)
