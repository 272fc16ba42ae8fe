"""A rank that dies in the middle of an all-reduce ends the others, with its number, and leaves none hanging."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from imagenet_fast.distributed.failure_detection import LOOK_S, report_failure
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.watchdog import watching_ranks
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.parallel.parallelize import parallelize
from imagenet_fast.parallel.pipeline_parallel import Pipeline
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, RingSync, SparseSync, attach
from tests.parallel.small import Tiny

ENGINES: tuple[EngineSettings, ...] = (
    LazySync(collective="native"),
    RingSync(),
    HybridSync(),
    DearSync(),
    SparseSync(dense_epochs=0),
)
LAYOUTS = (
    Parallel(tensor=2), Parallel(tensor=4), Parallel(pipeline=2, micro_batches=2),
    Parallel(pipeline=4, schedule="gpipe", micro_batches=2), Parallel(tensor=2, pipeline=2, micro_batches=2),
)  # fmt: skip
CASES = [*((engine, Parallel()) for engine in ENGINES), *((HybridSync(), layout) for layout in LAYOUTS)]
"""Engines and layouts."""
WORLD, DYING = 4, 2


@pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES[::7], marks=pytest.mark.ci, id="two"), pytest.param(CASES, marks=pytest.mark.weekly, id="all")],
)
def test_the_others_end_and_name_it(cases: list[tuple[EngineSettings, Parallel]], tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    worlds = []
    for number, (engine, tensor) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        worlds.append([context.Process(target=_train, args=(rank, engine, tensor, folder)) for rank in range(WORLD)])
    begun = time.monotonic()
    for process in chain(*worlds):
        process.start()
    for process in chain(*worlds):
        process.join(60)
    assert time.monotonic() - begun < 50
    for number, (case, ranks) in enumerate(zip(cases, worlds, strict=True)):
        assert [rank.exitcode for rank in ranks] == [0, 0, 9, 0], case
        messages = {(tmp_path / str(number) / str(rank)).read_text() for rank in range(WORLD) if rank != DYING}
        (message,) = messages
        assert message.startswith(f"rank 2 on {socket.gethostname()} stopped answering at step 4, in data; "), case


def _train(rank: int, engine: EngineSettings, parallel: Parallel, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    images, labels = torch.ones(2, 3, 5, 5), torch.zeros(2, dtype=torch.int64)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 2000))
    if parallel.ranks == 1:
        _, sync = attach(model, engine)
    else:
        division = parallelize(parallel, Tiny(), images, nullcontext())
        model, sync = division.own, division.synchronised(engine)

    def backpropagate() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()

    if isinstance(model, LocalStages):
        pipeline = Pipeline(
            model, division.layout.pipeline, parallel.schedule, parallel.micro_batches, nn.functional.cross_entropy,
            sync,
        )  # fmt: skip
        backpropagate = partial(pipeline, images, labels)
    with watching_ranks():
        try:
            for step in range(1, 1000):
                here.enter("data", step)
                if rank == DYING and step == 4:
                    time.sleep(3 * LOOK_S)  # which the thread beside this one tells the others of
                    os._exit(9)
                sync.zero_grad()
                backpropagate()
                sync.end_backward()
                sync.update(lambda *_: None)
        except RuntimeError as error:
            (folder / str(rank)).write_text(report_failure(error))
    os._exit(0)
