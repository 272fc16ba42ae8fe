"""A rank that dies, stops, hangs or leaves a collective out ends the others, with its number and its place."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
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
from torch._C._distributed_c10d import TCPStore

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.watchdog import Reason, report_failure, watching_ranks
from imagenet_fast.errors import JobAborted
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.parallel.parallelize import parallelize
from imagenet_fast.parallel.pipeline_parallel import Pipeline
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Timeout
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, RingSync, SparseSync
from tests.parallel.small import Tiny

WORLD, FAULTY, STEP = 4, 2, 4
FAULTS = {
    "killed": "rank 2 on {host} stopped answering in data at step 4; ",
    "stopped": "rank 2 on {host} stopped answering in data at step 4; rank 0-1, 3 waited in sync for some s",
    "hangs in its loader": "rank 2 on {host} has been in data at step 4 for some s, longer than timeout.step_s allows; "
    "rank 0-1, 3 waited in sync for some s",
    "leaves a collective out": "all ranks have waited for each other for some s, longer than timeout.step_s allows: "
    "rank 0-1, 3 in sync at step 4, rank 2 in sync at step 5",
}
"""What becomes of a rank in step 4, and how it is told."""
LAZY, ALONE = LazySync(collective="native"), Parallel()
ENGINES = (LAZY, RingSync(), HybridSync(), DearSync(), SparseSync(dense_epochs=0))
LAYOUTS = (
    Parallel(tensor=2), Parallel(tensor=4), Parallel(pipeline=2, micro_batches=2),
    Parallel(pipeline=4, schedule="gpipe", micro_batches=2), Parallel(tensor=2, pipeline=2, micro_batches=2),
)  # fmt: skip
Case = tuple[str, EngineSettings, Parallel]
EACH_FAULT: list[Case] = [(fault, LAZY, ALONE) for fault in FAULTS]
DEATHS: list[Case] = [
    *(("killed", engine, ALONE) for engine in ENGINES), *(("killed", HybridSync(), layout) for layout in LAYOUTS)
]  # fmt: skip


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([*EACH_FAULT, DEATHS[7]], marks=pytest.mark.ci, id="each fault"),
        pytest.param(DEATHS, marks=pytest.mark.weekly, id="each engine and layout"),
    ],
)
def test_whatever_stops_a_rank_the_others_end_in_time_and_say_where_it_is(cases: list[Case], tmp_path: Path):
    """And what says it is one sentence, the same on all."""
    context = multiprocessing.get_context("forkserver")
    folders = [tmp_path / str(number) for number in range(len(cases))]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in cases]
    worlds = []
    for case, store, folder in zip(cases, stores, folders, strict=True):
        folder.mkdir()
        worlds.append([context.Process(target=_train, args=(rank, *case, store.port, folder)) for rank in range(WORLD)])
    for process in chain(*worlds):
        process.start()
    healthy = [process for world in worlds for rank, process in enumerate(world) if rank != FAULTY]
    for process in healthy:
        process.join(60)
    assert [process.exitcode for process in healthy] == [1] * len(healthy)
    for process in chain(*worlds):
        process.kill()
    for (fault, *how), folder in zip(cases, folders, strict=True):
        said = {(folder / str(rank)).read_text() for rank in range(WORLD) if rank != FAULTY}
        (told,) = {re.sub(r"for \d+ s", "for some s", words) for words in said}
        assert told.startswith(FAULTS[fault].format(host=socket.gethostname())), (fault, how)


def _train(rank: int, fault: str, engine: EngineSettings, parallel: Parallel, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    images, labels = torch.ones(2, 3, 5, 5), torch.zeros(2, dtype=torch.int64)
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

    def end(reason: Reason) -> int:
        (folder / str(rank)).write_text(reason.message)
        return 1

    def fail() -> None:
        """In the faulty rank's way, once the others know where it is."""
        match fault:
            case "hangs in its loader":
                time.sleep(1000)
            case "leaves a collective out":
                here.enter("data", STEP + 1)
                with here.waiting():
                    dist.recv(torch.empty(3), src=0)
            case _:
                time.sleep(1.5)
                os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    try:
        with watching_ranks(Timeout(first_step_s=60, step_s=2.5), end):
            for step in range(1, 1000):
                here.enter("data", step)
                if rank == FAULTY and step == STEP:
                    fail()
                sync.zero_grad()
                backpropagate()
                sync.end_backward()
                sync.update(lambda *_: None)
    except (RuntimeError, JobAborted) as error:
        end(report_failure(error))
        os._exit(1)
