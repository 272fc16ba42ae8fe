"""When a run is saved, and what comes of a save that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.errors import JobAborted
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.evaluation import StopRequested
from tests.training.jobs import job_of

EVERY_SECOND = {"every_steps": 2, "every_minutes": 0}


def trained(step: int) -> Any:
    """A state that is sound, after this step."""
    outcome = SimpleNamespace(epochs=1, top1=None)
    return SimpleNamespace(
        step=step, outcome=outcome, settle=lambda: None, is_sound=lambda: True, shared=dict, own=dict
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of checkpoints: nothing can be written there until its parent is made."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def writer(root: Path) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(root, tests.world(0, 1))
    yield writer
    writer.close()


@pytest.fixture
def asked() -> list[bool]:
    return [False]


@pytest.fixture
def manager(root: Path, writer: CheckpointWriter, asked: list[bool]) -> CheckpointManager:
    job = job_of(root.parent, checkpoint=EVERY_SECOND)
    return CheckpointManager(job, tests.world(0, 1), writer, 64, lambda: asked[0])


def warned(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(" failed")[0] for line in capsys.readouterr().err.splitlines()]


def test_a_failed_save_is_warned_of_once_and_tried_again_when_the_next_is_due(
    manager: CheckpointManager, writer: CheckpointWriter, root: Path, capsys: pytest.CaptureFixture[str]
):
    for step in (1, 2):
        manager.after_step(trained(step))
    writer.join(10.0)
    for _ in range(3):
        manager.after_step(trained(3))
    assert warned(capsys) == ["warning: the checkpoint of step 2"]
    root.parent.mkdir()
    manager.after_step(trained(4))
    assert manager.last_saved() == 4
    assert not manager.finish(trained(5), evaluated=True)
    assert manager.saved_step == 4, "the end is saved by whoever evaluates it"
    assert warned(capsys) == []


def test_a_failed_save_is_tried_again_at_the_end(manager: CheckpointManager, root: Path):
    manager.save(trained(7), evaluated=True)
    assert "the checkpoint of step 7 failed" in manager.finish(trained(7), evaluated=True)
    root.parent.mkdir()
    assert not manager.finish(trained(7), evaluated=True)
    assert manager.saved_step == 7


def test_a_stop_comes_after_the_save(manager: CheckpointManager, root: Path, asked: list[bool]):
    manager.after_step(trained(1))
    asked[0] = True
    with pytest.raises(JobAborted, match="the checkpoint of step 3 failed: "):
        manager.after_step(trained(3))
    root.parent.mkdir()
    with pytest.raises(StopRequested):
        manager.after_step(trained(5))
    assert manager.saved_step == 5
