"""What comes of a save that fails, and of a stop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.errors import JobAborted
from imagenet_fast.training.checkpoint_manager import CheckpointManager, open_checkpoints
from imagenet_fast.training.evaluation import StopRequested
from tests.conftest import refuses
from tests.e2e.command import wait_for
from tests.training.jobs import job_of


def trained(step: int) -> Any:
    """A state that is sound, after this step."""
    outcome = SimpleNamespace(epochs=1, top1=None)
    return SimpleNamespace(step=step, outcome=outcome, settle=bool, is_finite=lambda: True, shared=dict, own=dict)


class Saving(CheckpointManager):
    """After every second step, to a disk that takes nothing until it is ``ready``."""

    def __init__(self, run: Path) -> None:
        job = job_of(run, checkpoint={"every_steps": 2, "every_minutes": 0})
        self.ready, self.told_to_stop = partial((run / "checkpoints").mkdir, parents=True), False
        self.writer = CheckpointWriter(run / "checkpoints", tests.world(0, 1))
        super().__init__(job, tests.world(0, 1), self.writer, {}, lambda: self.told_to_stop)


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    saving = Saving(tmp_path / "run")
    yield saving
    saving.writer.close()


def test_a_failed_save_is_warned_of_once_and_tried_again_when_the_next_is_due(
    saving: Saving, capsys: pytest.CaptureFixture[str]
):
    saving.before_step(trained(2))
    wait_for(lambda: not saving.writer.under_way)
    for _ in range(3):
        saving.before_step(trained(3))
    assert capsys.readouterr().err.count("warning: the checkpoint of step 2 failed: ") == 1
    saving.ready()
    saving.before_step(trained(4))
    assert saving.last_saved() == 4
    assert not saving.finish(trained(5), evaluated=True)
    assert (saving.saved_step, capsys.readouterr().err) == (4, "")


def test_a_failed_save_is_tried_again_at_the_end(saving: Saving):
    saving.save(trained(7), evaluated=True)
    assert "the checkpoint of step 7 failed" in str(saving.finish(trained(7), evaluated=True))
    saving.ready()
    assert not saving.finish(trained(7), evaluated=True)
    assert saving.saved_step == 7


def test_a_stop_saves(saving: Saving):
    saving.told_to_stop = True
    with pytest.raises(StopRequested):
        saving.before_step(trained(3))
    with pytest.raises(JobAborted, match="the checkpoint of step 3 failed: "):
        saving.save_for_stop(trained(3))
    saving.ready()
    saving.save_for_stop(trained(5))
    assert saving.saved_step == 5


def test_a_run_that_would_resume_needs_a_directory_that_all_nodes_see(tmp_path: Path):
    opened = open_checkpoints(job_of(tmp_path, resume=True), tests.world(), {}, Mock(), None)
    with patch("imagenet_fast.training.checkpoint_manager.common_folder", return_value=None):
        refuses(f"not every node sees {tmp_path}.* give an --out that all of them share", opened.__enter__)
