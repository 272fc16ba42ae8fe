"""A rank that dies in the middle of an all-reduce ends the others, with its number, and leaves none hanging."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from imagenet_fast.ranks.roll_call import answering_roll_calls, report_failure
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, RingSync, SparseSync, attach

ENGINES: tuple[EngineSettings, ...] = (
    LazySync(collective="native"),
    RingSync(),
    HybridSync(),
    DearSync(),
    SparseSync(dense_epochs=0),
)
WORLD, DYING = 4, 2


@pytest.mark.long
def test_the_others_end_and_name_it(tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    worlds = []
    for number, engine in enumerate(ENGINES):
        folder = tmp_path / str(number)
        folder.mkdir()
        worlds.append([context.Process(target=_train, args=(rank, engine, folder)) for rank in range(WORLD)])
    begun = time.monotonic()
    for process in chain(*worlds):
        process.start()
    for process in chain(*worlds):
        process.join(60)
    assert time.monotonic() - begun < 50
    for number, (engine, ranks) in enumerate(zip(ENGINES, worlds, strict=True)):
        assert [rank.exitcode for rank in ranks] == [0, 0, 9, 0], engine
        messages = {(tmp_path / str(number) / str(rank)).read_text() for rank in range(WORLD) if rank != DYING}
        assert messages == {"rank 2 ended or stopped answering; its own output says why"}, engine


def _train(rank: int, engine: EngineSettings, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2000))
    _, sync = attach(model, engine)
    with answering_roll_calls():
        try:
            for step in range(1000):
                if rank == DYING and step == 3:
                    os._exit(9)
                sync.zero_grad()
                model(torch.ones(2, 3, 8, 8)).sum().backward()
                sync.finish()
                sync.update(lambda *_: None)
        except RuntimeError as error:
            (folder / str(rank)).write_text(report_failure(error))
    os._exit(0)
