"""Spawn gloo ranks, run a function on each, and bring back what every rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on each of ``world`` ranks of a gloo group; the results, by rank.

    The traceback of the first rank that failed is raised here. Give one function many cases: ranks cost
    about a second.
    """
    multiprocessing.set_forkserver_preload(
        ["imagenet_fast.training.loop"]
    )  # so that torch is imported once, not by each rank
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (world, function, arguments, folder), nprocs=world, join=False, start_method="forkserver"
        )
        try:
            while not context.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            failures = sorted(Path(folder).glob("failure-*"))
            raise AssertionError("\n".join(f.read_text() for f in failures[:1])) from None
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        result = function(*arguments)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        (Path(folder) / f"failure-{rank}").write_text(f"rank {rank} of {world}:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
