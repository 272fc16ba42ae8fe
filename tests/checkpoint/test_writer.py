"""Checkpoints written by a thread of each rank: what disks, other ranks and kills do to them."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from imagenet_fast.checkpoint import CheckpointWriter, newest, open_checkpoint
from imagenet_fast.checkpoint import folder as folders
from imagenet_fast.checkpoint.folder import retain
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import JobAborted, UserError
from tests.checkpoint.trees import ALONE, found_step, names, same, saved, stamp, state
from tests.conftest import refusal_of
from tests.ranks import with_ranks


def together(*roots: Path, timeout: timedelta = timedelta(seconds=30)) -> list[CheckpointWriter]:
    """A writer a rank, in one process: they meet in a store alone."""
    store, size = HashStore(), len(roots)
    return [
        CheckpointWriter(root, RankInfo(rank, size, rank, size), store, keep=9, timeout=timeout)
        for rank, root in enumerate(roots)
    ]


def save_all(writers: list[CheckpointWriter], step: int) -> None:
    for rank, writer in enumerate(writers):
        writer.save(stamp(step, world=len(writers)), state(step), state(step, rank=1 + rank))


def failures(writers: list[CheckpointWriter]) -> list[str]:
    def failure(writer: CheckpointWriter) -> str:
        with pytest.raises((UserError, JobAborted)) as told:
            writer.wait()
        return str(told.value)

    return list(map(failure, writers))


def test_slow_disk_delays_no_step_and_what_is_saved_is_the_state_at_that_moment(tmp_path: Path, monkeypatch):
    awake, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        awake.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    weights, progress = torch.zeros(100_000), {"step": 1}
    with CheckpointWriter(tmp_path, ALONE) as writer:
        writer.save(stamp(1), {"weights": weights, "progress": progress})
        for _ in range(100):
            weights += 1
            progress["step"] += 1
        assert writer.under_way
        assert newest(tmp_path) is None, "it is no checkpoint before all of it is on the disk"
        awake.set()
    found = open_checkpoint(tmp_path / "step-00000001").shared
    assert same(found, {"weights": torch.zeros(100_000), "progress": {"step": 1}})


def test_ranks_write_their_parts_and_rank_0_what_all_have(tmp_path: Path):
    writers = together(*[tmp_path] * 3)
    for step in (10, 20):
        save_all(writers, step)
    assert {writer.wait() for writer in writers} == {tmp_path / "step-00000020"}
    assert names(tmp_path / "step-00000020") == [
        "manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(3)), "shared.safetensors",
    ]  # fmt: skip
    found = open_checkpoint(tmp_path / "step-00000020")
    assert same(found.shared, state(20))
    assert same(dict(found.parts()), {rank: state(20, rank=1 + rank) for rank in range(3)})


def test_what_ranks_hold_alike_is_written_once(tmp_path: Path):
    """Of hundreds of ranks, after each evaluation."""
    writers, unlike = together(*[tmp_path] * 4), 2
    for rank, writer in enumerate(writers):
        writer.save(stamp(1, world=4), state(1), state(1, rank=9 if rank == unlike else 5))
    (folder,) = {writer.wait() for writer in writers}
    assert [name for name in names(folder) if "rank" in name] == ["rank-00000.safetensors", "rank-00002.safetensors"]
    found = open_checkpoint(folder)
    assert same(dict(found.parts()), {rank: found.part(rank) for rank in range(4)})
    assert same([found.part(rank) for rank in range(4)], [state(1, rank=9 if r == unlike else 5) for r in range(4)])


def test_a_rank_with_nothing_of_its_own_writes_nothing(tmp_path: Path):
    writers = together(tmp_path, tmp_path)
    for rank, writer in enumerate(writers):
        writer.save(stamp(1, world=2), state(1), None if rank == 0 else {})
    assert {writer.wait() for writer in writers} == {tmp_path / "step-00000001"}
    assert dict(open_checkpoint(tmp_path / "step-00000001").parts()) == {1: {}}


def test_rank_without_the_directory_is_named(tmp_path: Path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    root.mkdir()
    writers = together(root, root, elsewhere)
    for rank, there in ((2, elsewhere / ".step-00000003"), (0, root / ".step-00000003/rank-00002.safetensors")):
        save_all(writers, 3)
        assert failures(writers) == [
            f"the checkpoint of step 3 failed: rank {rank} on {os.uname().nodename}: {there} cannot be written (No "
            "such file or directory); have every node see that directory, and nobody remove it, then start again"
        ] * 3  # fmt: skip
        assert names(root) == []
        for writer in writers:
            assert writer.wait() is None  # told once
        elsewhere.mkdir(exist_ok=True)  # as a directory of that node's own


def test_a_rank_that_writes_nothing_fails_the_checkpoint_in_time(tmp_path: Path):
    saved(tmp_path, 1)
    writers = together(*[tmp_path] * 3, timeout=timedelta(seconds=0.2))
    for rank in (0, 1):
        writers[rank].save(stamp(2, world=3), state(2))
    told = failures(writers[:2])
    assert told == [
        "the checkpoint of step 2 failed: rank 2 did not write its part within 0.2 s; see its output, and whether its "
        "disk is slow, then resume from step-00000001"
    ] * 2  # fmt: skip
    assert names(tmp_path) == ["step-00000001"]


def test_a_rank_0_that_is_gone_is_missed(tmp_path: Path):
    writers = together(*[tmp_path] * 2, timeout=timedelta(seconds=0.1))
    writers[1].save(stamp(2, world=2), None, state(2))
    assert failures(writers[1:]) == ["the checkpoint of step 2 was given up, as rank 0 does not answer; see its output"]


def test_after_an_error_nobody_waits_and_the_next_run_sweeps(tmp_path: Path):
    writers = together(tmp_path, tmp_path, timeout=timedelta(minutes=10))
    with suppress(ZeroDivisionError), writers[0]:
        writers[0].save(stamp(2, world=2), state(2), state(2))
        while not list(tmp_path.glob("*/shared.safetensors")):
            time.sleep(0.001)
        raise ZeroDivisionError
    assert not writers[0].under_way
    assert newest(tmp_path) is None
    assert names(tmp_path) == [".step-00000002"]
    saved(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003"]


@with_ranks(3)
def test_the_store_is_left_clean_beside_collectives(tmp_path: Path):
    """That at which the ranks met: two more checkpoints leave no more keys in it."""
    rank, store, keys = dist.get_rank(), dist.distributed_c10d._get_default_store(), []
    with CheckpointWriter(tmp_path, RankInfo(rank, 3, rank, 3), store, keep=0) as writer:
        dist.barrier()
        for step in range(1, 4):
            writer.save(stamp(step, world=3), state(step), state(step, rank=1 + rank))
            for _ in range(20):
                dist.all_reduce(torch.ones(100))
            writer.wait()
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
    assert keys[-1] == keys[0]
    found = open_checkpoint(tmp_path / "step-00000003")
    assert same(dict(found.parts()), {rank: state(3, rank=1 + rank) for rank in range(3)})


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free space there"), (errno.EROFS, "make it writable"), (errno.EFBIG, "raise `ulimit -f`")],
    ids=["full", "read-only", "limited"],
)
def test_what_a_disk_refuses_is_told_and_the_next_one_is_saved(number: int, fix: str, tmp_path: Path, monkeypatch):
    def refuse(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    with CheckpointWriter(tmp_path, ALONE) as writer, monkeypatch.context() as patch:
        writer.save(stamp(1), state(1), state(1, rank=1))
        writer.wait()
        patch.setattr(os, "fsync", refuse)
        writer.save(stamp(2), state(2), state(2, rank=1))
        where = f"the checkpoint of step 2 failed: {tmp_path}/.step-00000002/shared.safetensors cannot be written"
        assert refusal_of(writer.wait) == f"{where} ({os.strerror(number)}); {fix}, then resume from step-00000001"
        assert (names(tmp_path), found_step(tmp_path)) == (["step-00000001"], 1)
        patch.undo()
        saved(tmp_path, 3)
    assert found_step(tmp_path) == 3


@pytest.mark.parametrize("short", [0, 1])
def test_memory_that_one_rank_lacks_fails_this_save_on_all_and_no_later_one(short: int, tmp_path: Path, monkeypatch):
    """A limit of the memory that may be pinned, or a cgroup's."""
    writers, empty = together(tmp_path, tmp_path), torch.empty

    def refuse(size: int, **settings: Any) -> torch.Tensor:
        if size:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        return empty(size, **settings)

    for rank, writer in enumerate(writers):
        with monkeypatch.context() as patch:
            if rank == short:
                patch.setattr(torch, "empty", refuse)
            writer.save(stamp(1, world=2), state(1), state(1, rank=1 + rank))
    (told,) = set(failures(writers))
    assert f"the checkpoint of step 1 failed: rank {short} on " in told
    assert "(no memory: CUDA error: out of memory); give ranks more memory, or raise `ulimit -l`, then start" in told
    assert names(tmp_path) == []
    save_all(writers, 2)
    assert {writer.wait() for writer in writers} == {tmp_path / "step-00000002"}


@pytest.mark.parametrize(("niceness", "asked"), [(0, 10), (15, 15)])
def test_a_job_with_a_niceness_of_its_own_saves_too(niceness: int, asked: int, tmp_path: Path, monkeypatch):
    """Only root may lower a niceness: a thread under `nice -n 15` keeps its 15."""
    setpriority = Mock(side_effect=PermissionError)
    monkeypatch.setattr(os, "setpriority", setpriority)
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    saved(tmp_path, 4)
    assert setpriority.call_args.args[2] == asked
    assert found_step(tmp_path) == 4


def test_no_error_of_the_thread_counts_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("imagenet_fast.checkpoint.writer.Board", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saved(tmp_path, 4)


def test_all_ranks_wait_while_one_removes_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else those that train on would wait for it at the next step, as for one that hangs."""
    writers = together(tmp_path, tmp_path)
    retained, removing = threading.Event(), retain

    def slow(*arguments: Any) -> None:
        retained.wait(60)
        removing(*arguments)

    monkeypatch.setattr(folders, "retain", slow)
    save_all(writers, 4)
    time.sleep(0.3)
    assert [writer.under_way for writer in writers] == [True, True]
    retained.set()
    for writer in writers:
        assert writer.wait() == tmp_path / "step-00000004"


def test_what_a_disk_refuses_several_ranks_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    writers = together(*[tmp_path] * 3)
    save_all(writers, 2)
    (told,) = set(failures(writers))
    assert "cannot be written (Read-only file system), and 2 more; make it writable, then" in told
