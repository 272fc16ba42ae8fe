"""A job that is handed to ranks comes back as it was."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Evaluation, Job, read_job, write_job
from imagenet_fast.recipe.load import parse_recipe
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


def test_a_job_from_before_runs_could_start_from_weights_is_read_too(tmp_path: Path):
    write_job(PLAIN, tmp_path / "job.json")
    table = json.loads((tmp_path / "job.json").read_text())
    del table["init_from"], table["fresh_head"], table["resume"], table["elastic"]
    (tmp_path / "job.json").write_text(json.dumps(table))
    assert read_job(tmp_path / "job.json", Job) == PLAIN


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
