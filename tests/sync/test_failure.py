"""A rank that dies in the middle of an all-reduce ends the others, with its number, and leaves none hanging."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, RingSync, SparseSync, attach
from imagenet_fast.world import answer_roll_call, report_failure

ENGINES: tuple[EngineSettings, ...] = (
    LazySync(collective="native"),
    RingSync(),
    HybridSync(),
    DearSync(),
    SparseSync(dense_epochs=0),
)
WORLD, DYING = 4, 2


@pytest.mark.parametrize("number", range(len(ENGINES)), ids=lambda n: repr(ENGINES[n])[:60])
def test_the_others_end_and_name_it(number: int):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["imagenet_fast.train"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_train, args=(rank, number, folder)) for rank in range(WORLD)]
        begun = time.monotonic()
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(40)
        assert time.monotonic() - begun < 30
        assert [rank.exitcode for rank in ranks] == [0, 0, 9, 0]
        messages = {Path(f"{folder}/{rank}").read_text() for rank in range(WORLD) if rank != DYING}
        assert messages == {"rank 2 ended or stopped answering; its own output says why"}


def _train(rank: int, number: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    answer_roll_call()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2000))
    _, sync = attach(model, ENGINES[number])
    try:
        for step in range(1000):
            if rank == DYING and step == 3:
                os._exit(9)
            sync.zero_grad()
            model(torch.ones(2, 3, 8, 8)).sum().backward()
            sync.finish()
            sync.update(lambda params: None)
    except RuntimeError as error:
        Path(f"{folder}/{rank}").write_text(report_failure(error))
    os._exit(0)
