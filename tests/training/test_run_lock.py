"""A run directory belongs to one run at a time, and no work in it is ever lost."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.errors import JobAborted, UserError
from imagenet_fast.recipe.job import recipe_tables
from imagenet_fast.training.resume import find_resumption
from imagenet_fast.training.run_lock import _make_and_lock, claimed, locked, make_room
from tests.checkpoint.trees import ALONE, stamp
from tests.conftest import refusal_of, refuses
from tests.data.prepare.replica import tree
from tests.e2e.command import events_of, outcome_of, train_here
from tests.ranks import run, with_ranks
from tests.training.jobs import job_of


def begun(folder: Path, left: str = "events.jsonl") -> Path:
    """What a run without checkpoints has left."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    (folder / left).write_text("something")
    return folder


def claim(folder: Path, resume: bool) -> str:
    """On a rank: why ``folder`` cannot be had by a run that has no checkpoint to go on from."""
    job = job_of(folder, resume=resume)
    try:
        with claimed(job, tests.world()):
            if dist.get_rank() == 0:
                make_room(job)
            dist.barrier()
            made = folder.is_dir()
            dist.barrier()  # behind it an empty one is removed
            return "" if made else "not made"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("left", ["events.jsonl", "outcome.json", "checkpoints/final.safetensors"])
def test_a_run_without_checkpoints_is_moved_aside_whole(left: str, tmp_path: Path):
    for number in (1, 2):
        folder = begun(tmp_path / "run", left)
        before = tree(folder)
        assert run(2, claim, folder, True) == ["", ""]
        assert not folder.exists(), "it was claimed for nothing"
        assert tree(tmp_path / f"run.replaced-{number}") == before


def test_a_run_that_cannot_be_moved_is_refused_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where it is mounted, say."""
    folder = begun(tmp_path / "run")
    before = tree(tmp_path)
    busy = OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    monkeypatch.setattr(Path, "rename", Mock(side_effect=busy))
    assert refusal_of(make_room, job_of(folder, resume=True)) == (
        f"{folder} holds a run without a checkpoint to go on from, and cannot be moved to {folder}.replaced-1 (Device "
        "or resource busy); move what is in it away, or give another --out"
    )
    assert tree(tmp_path) == before


def test_locked_directory_is_refused_untouched(tmp_path: Path):
    folder = begun(tmp_path / "run")
    before = tree(tmp_path)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refuses(f"^{folder} is being trained by another process; stop that first$", locked(folder).__enter__)
    assert tree(tmp_path) == before
    os.close(descriptor)
    assert all("already holds a run" in refusal for refusal in run(2, claim, folder, False))
    assert tree(tmp_path) == before
    assert run(2, claim, tmp_path / "new" / "run", False) == ["", ""]
    assert not (tmp_path / "new" / "run").exists(), "it was claimed for nothing"


@pytest.mark.ci
def test_all_ranks_give_up_on_a_locked_directory_after_a_while(tmp_path: Path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    begun_at = time.monotonic()
    assert run(2, claim, tmp_path, True) == [f"{tmp_path} is being trained by another process; stop that first"] * 2
    assert time.monotonic() - begun_at < 30
    assert tmp_path.is_dir(), "the other run has just begun, and its directory is empty"
    os.close(descriptor)


def test_removed_directory_is_made_anew_by_waiting_run(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    locked, flock = dict[int, int](), fcntl.flock

    def and_meanwhile_it_is_removed(descriptor: int, operation: int) -> None:
        if not locked:
            folder.rmdir()
        locked[len(locked)] = os.fstat(descriptor).st_nlink
        flock(descriptor, operation)
        if len(locked) == 2:
            assert os.path.samestat(os.fstat(descriptor), folder.stat())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", and_meanwhile_it_is_removed)
        _make_and_lock(folder)
    assert [links > 0 for links in locked.values()] == [False, True], "the first lock was of a directory that is gone"


@with_ranks(1)
def test_a_run_goes_on_from_its_last_whole_checkpoint_whatever_its_outcome_says_but_not_for_fewer_epochs(
    tmp_path: Path,
):
    folder = begun(tmp_path / "run", "outcome.json")
    job = job_of(folder, resume=True)
    with CheckpointWriter(folder / "checkpoints", ALONE) as writer:
        for step in (6, 8):
            writer.save(stamp(step), {"recipe": recipe_tables(job.recipe), "saved_at": 0.0})
    (folder / "checkpoints" / "step-00000008" / "shared.safetensors").write_bytes(b"damaged")
    resumption = find_resumption(job, tests.world())
    assert resumption.step == 6
    assert resumption.checkpoint.damaged == (folder / "checkpoints" / "step-00000008",)
    resumption.check_length(epochs=2, steps_per_epoch=4)
    assert refusal_of(resumption.check_length, 1, 4) == (
        f"epochs is 1, and {folder}/checkpoints/step-00000006 has been trained for 1.5 epochs; give epochs=2 or more, "
        "or begin another run with --init-from"
    )


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_directory_is_renamed_is_whole_under_the_new_name_and_goes_on_there(replaced: bool, tmp_path: Path):
    """Also where another has begun under the old name: nothing is written there."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    ((recorded, told),) = run(1, train_and_rename, folder, moved, replaced, fresh=True)
    assert told.startswith(f"trained to the end, but {folder}/checkpoints/final.safetensors cannot be written (")
    assert [*folder.rglob("*")] == [folder / "checkpoints"] * replaced
    assert folder.exists() == replaced, "it is not made anew"
    assert (moved / "events.jsonl").read_text() == recorded
    assert run(1, train_and_rename, moved, None, False, fresh=True) == [("", "finished")]
    assert [event["step"] for event in events_of(moved, "train")] == [*range(1, 9)]


def train_and_rename(folder: Path, to: Path | None, replaced: bool) -> tuple[str, str]:
    """In one of the first of eight steps: what was recorded then, and how the run ended."""
    calls, recorded = count(1), ""

    def asked() -> bool:
        nonlocal recorded
        if next(calls) == 3 and to is not None:
            folder.rename(to)
            recorded = (to / "events.jsonl").read_text()
            if replaced:
                (folder / "checkpoints").mkdir(parents=True)
        return False

    job = job_of(folder, resume=True, checkpoint={"every_steps": 1})
    try:
        return recorded, train_here(job, lambda: asked).status
    except JobAborted as error:
        return recorded, str(error)


@with_ranks(1, fresh=True)
def test_inodes_that_get_other_numbers_are_no_other_files(tmp_path: Path):
    """File systems in user space may forget the numbers that they gave."""
    stat, numbers = Path.stat, count(10**9)

    def renumbered(path: Path, **how: bool) -> os.stat_result:
        mode, _, *rest = stat(path, **how)
        return os.stat_result((mode, next(numbers), *rest))

    with patch.object(Path, "stat", renumbered):
        assert train_here(job_of(tmp_path)).status == "finished"
    assert outcome_of(tmp_path)["status"] == "finished"
    assert events_of(tmp_path, "end")
    assert len([*tmp_path.glob("checkpoints/step-*")]) == 2


@with_ranks(1, fresh=True)
def test_a_run_that_has_ended_is_never_trained_again_whatever_became_of_its_checkpoints(tmp_path: Path):
    """While they are whole, damaged, old and gone. Nor does its lock outlive it."""
    train_here(job_of(tmp_path, resume=True))
    old, last = sorted(tmp_path.glob("checkpoints/step-*"))
    before = tree(tmp_path)
    with redirect_stdout(io.StringIO()) as printed:
        for change in (lambda: None, (last / "manifest.json").unlink, partial(rmtree, last), partial(rmtree, old)):
            change()
            train_here(job_of(tmp_path, resume=True))
    told = f"Trained to the end; the recipe has no target.\n{tmp_path} had ended so; its weights are {tmp_path}"
    assert printed.getvalue() == f"{told}/checkpoints/final.safetensors\n" * 4
    assert refusal_of(train_here, job_of(tmp_path, resume=True, epochs=3)) == (
        f"{tmp_path} holds a run that has ended, and no checkpoint from which it could go on; give another --out, "
        f"with --init-from {tmp_path} to start from its weights"
    )
    assert tree(tmp_path) == {name: content for name, content in before.items() if "step-" not in name}
    fcntl.flock(os.open(tmp_path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


@with_ranks(1, fresh=True)
def test_a_longer_run_that_could_not_begin_its_record_is_not_taken_for_ended(tmp_path: Path):
    """It goes on, once the disk has room for its record."""
    train_here(job_of(tmp_path, resume=True))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))
    with patch("imagenet_fast.metrics.record.take_back", side_effect=full):
        assert "No space left on device" in refusal_of(train_here, job_of(tmp_path, resume=True, epochs=3))
    train_here(job_of(tmp_path, resume=True, epochs=3))
    assert outcome_of(tmp_path)["epochs"] == 3


@pytest.mark.parametrize("left", ["events.jsonl", "checkpoints/final.safetensors"])
@with_ranks(1, fresh=True)
def test_a_start_that_fails_changes_nothing(left: str, tmp_path: Path):
    """As one with another network, which is known only when it is built; see also ``test_trainer.py``."""
    before = tree(begun(tmp_path / "run", left))
    with patch("imagenet_fast.training.trainer.build_initial_model", side_effect=UserError("no such network")):
        assert refusal_of(train_here, job_of(tmp_path / "run", resume=True)) == "no such network"
    assert tree(tmp_path / "run") == before
