"""A run directory belongs to one run at a time, and no work in it is ever lost."""

from __future__ import annotations

import fcntl
import json
import os
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch.distributed as dist

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.job import recipe_tables
from imagenet_fast.training.resume import find_resumption
from imagenet_fast.training.run_lock import claimed, lock_run_dir, make_and_lock_run_dir, move_record_aside
from tests.checkpoint.trees import ALONE, stamp
from tests.ranks import run
from tests.training.jobs import job_of

TRAINED = {"event": "train", "step": 3, "run_s": 1.0, "loss": 2.0}
EVALUATED = {"event": "eval", "step": 4, "run_s": 2.0, "top1": 50.0}


def begun(folder: Path, *events: dict[str, object], status: str | None = None, final: bool = False) -> Path:
    """What a run without checkpoints has left."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "tb").mkdir()
    (folder / "tb" / "events.out.tfevents.1.host").write_bytes(b"a curve of an earlier version")
    (folder / "events.out.tfevents.2.host").write_bytes(b"a curve")
    (folder / "job.json").write_text("{}")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if status is not None:
        outcome = {"status": status, "recipe": "test", "sync": "lazy", "world_size": 1, "global_batch": 16, "steps": 8}
        (folder / "outcome.json").write_text(json.dumps(outcome))
    if final:
        (folder / "checkpoints" / "final.safetensors").write_bytes(b"weights")
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def looked_for(folder: Path) -> str:
    """On a rank: why a run in ``folder`` cannot go on; nothing where it begins."""
    try:
        assert find_resumption(job_of(folder, resume=True), tests.world()) is None
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("events", "status", "final"),
    [
        ((TRAINED,), "reached", False), ((TRAINED,), "finished", False), ((TRAINED,), "preempted", False),
        ((TRAINED,), None, True), ((TRAINED, EVALUATED), "interrupted", False), ((), None, True),
    ],
    ids=["reached", "finished", "saved at a stop", "final", "evaluated", "only weights"],
)  # fmt: skip
def test_run_without_its_checkpoints_is_refused_untouched(
    events: tuple[dict[str, object], ...], status: str | None, final: bool, tmp_path: Path
):
    folder = begun(tmp_path / "run", *events, status=status, final=final)
    before = contents(tmp_path)
    (refusal,) = run(1, looked_for, folder)
    assert str(folder) in refusal
    assert "no checkpoint" in refusal
    assert "give another --out" in refusal
    assert contents(tmp_path) == before


def test_run_without_progress_restarts_and_moves_record_aside(tmp_path: Path):
    for number in (1, 2):
        folder = begun(tmp_path / "run", TRAINED, status="failed") if number == 1 else tmp_path / "run"
        if number == 2:
            (folder / "events.jsonl").write_text(json.dumps(TRAINED) + "\n")
        before = contents(folder)
        assert run(1, looked_for, folder) == [""]
        assert contents(folder) == before, "not yet"
        move_record_aside(folder)
        assert contents(folder) == {}
        assert contents(tmp_path / f"run.replaced-{number}") == before


def test_run_killed_before_first_checkpoint_restarts(tmp_path: Path):
    folder = begun(tmp_path / "run", TRAINED, EVALUATED)
    assert "has been evaluated" in run(1, looked_for, folder)[0]
    (folder / "checkpoints" / ".none-yet").touch()
    assert run(1, looked_for, folder) == [""]
    with CheckpointWriter(folder / "checkpoints", ALONE) as writer:
        writer.save(stamp(4), {"step": 4})
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    checkpoint.rename(tmp_path / "removed")
    assert "has been evaluated" in run(1, looked_for, folder)[0]


def test_where_nothing_may_be_beside_a_run_its_record_is_moved_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = begun(tmp_path / "run", TRAINED)
    before = contents(folder)
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: int) -> None:
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments)

    monkeypatch.setattr(Path, "mkdir", refuse)
    move_record_aside(folder)
    assert contents(folder / "replaced-1") == before
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "replaced-1"}


def claim(folder: Path, resume: bool) -> str:
    """On a rank: why ``folder`` cannot be had."""
    try:
        with claimed(job_of(folder, resume=resume), tests.world()):
            made = folder.is_dir()
            dist.barrier()  # behind it an empty one is removed
            return "" if made else "not made"
    except UserError as error:
        return str(error)


def test_locked_directory_is_refused_untouched(tmp_path: Path):
    folder = begun(tmp_path / "run", TRAINED)
    before = contents(tmp_path)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=f"^{folder} is being trained by another process; stop that first$"):
        lock_run_dir(folder, timeout_s=0.0)
    assert contents(tmp_path) == before
    os.close(descriptor)
    assert run(2, claim, folder, True) == ["", ""]
    assert all("already holds a run" in refusal for refusal in run(2, claim, folder, False))
    assert contents(tmp_path) == before
    assert run(2, claim, tmp_path / "new" / "run", False) == ["", ""]
    assert not (tmp_path / "new" / "run").exists(), "it was claimed for nothing"


@pytest.mark.ci
def test_all_ranks_give_up_on_a_locked_directory_after_a_while(tmp_path: Path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    begun_at = time.monotonic()
    assert run(2, claim, tmp_path, True) == [f"{tmp_path} is being trained by another process; stop that first"] * 2
    assert time.monotonic() - begun_at < 30
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
        make_and_lock_run_dir(folder)
    assert [links > 0 for links in locked.values()] == [False, True], "the first lock was of a directory that is gone"


def test_damaged_outcome_resumes_and_fewer_epochs_are_refused(tmp_path: Path):
    folder = begun(tmp_path / "run", TRAINED, EVALUATED)
    (folder / "outcome.json").write_text('{"status": "fin')
    step, refusal = run(1, gone_on, folder)[0]
    assert step == 6
    assert refusal == (
        f"epochs is 1, and {folder}/checkpoints/step-00000006 has been trained for 1.5 epochs; give epochs=2 or more, "
        "or begin another run with --init-from"
    )


def gone_on(folder: Path) -> tuple[int, str]:
    """From which step, and why not for fewer epochs."""
    job = job_of(folder, resume=True)
    with CheckpointWriter(folder / "checkpoints", ALONE) as writer:
        writer.save(stamp(6), {"recipe": recipe_tables(job.recipe), "saved_at": 0.0})
    resumption = find_resumption(job, tests.world())
    assert resumption is not None
    resumption.check_length(epochs=2, steps_per_epoch=4)
    with pytest.raises(UserError) as refused:
        resumption.check_length(epochs=1, steps_per_epoch=4)
    return resumption.step, str(refused.value)
