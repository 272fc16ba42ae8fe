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

from imagenet_fast.parallel.layout import lay_out
from imagenet_fast.parallel.pools import Pools
from imagenet_fast.parallel.tensor import shard
from imagenet_fast.ranks.roll_call import answering_roll_calls, report_failure
from imagenet_fast.recipe.schema import Parallel
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, RingSync, SparseSync, attach
from tests.parallel.small import Tiny

ENGINES: tuple[EngineSettings, ...] = (
    LazySync(collective="native"),
    RingSync(),
    HybridSync(),
    DearSync(),
    SparseSync(dense_epochs=0),
)
CASES = [*((engine, 1) for engine in ENGINES), (LazySync(), 2), (HybridSync(), 4)]
"""Engines, and over how many ranks layers are sharded."""
WORLD, DYING = 4, 2


@pytest.mark.long
def test_the_others_end_and_name_it(tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    worlds = []
    for number, (engine, tensor) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        worlds.append([context.Process(target=_train, args=(rank, engine, tensor, folder)) for rank in range(WORLD)])
    begun = time.monotonic()
    for process in chain(*worlds):
        process.start()
    for process in chain(*worlds):
        process.join(60)
    assert time.monotonic() - begun < 50
    for number, (case, ranks) in enumerate(zip(CASES, worlds, strict=True)):
        assert [rank.exitcode for rank in ranks] == [0, 0, 9, 0], case
        messages = {(tmp_path / str(number) / str(rank)).read_text() for rank in range(WORLD) if rank != DYING}
        assert messages == {"rank 2 ended or stopped answering; its own output says why"}, case


def _train(rank: int, engine: EngineSettings, tensor: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 2000))
    if tensor == 1:
        _, sync = attach(model, engine)
    else:
        model = Tiny()
        sync = Pools(model, engine, shard(model, lay_out(Parallel(tensor=tensor), torch.device("cpu"))))
    with answering_roll_calls():
        try:
            for step in range(1000):
                if rank == DYING and step == 3:
                    os._exit(9)
                sync.zero_grad()
                model(torch.ones(2, 3, 5, 5)).sum().backward()
                sync.finish()
                sync.update(lambda *_: None)
        except RuntimeError as error:
            (folder / str(rank)).write_text(report_failure(error))
    os._exit(0)
