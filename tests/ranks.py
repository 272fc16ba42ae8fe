"""Spawn ranks, run a function on each, and bring back what every rank returned."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", fresh: bool = False
) -> list[Any]:
    """``function(*arguments)`` on each of ``world`` ranks of one group; the results, by rank.

    With the backend "nccl" each rank has a GPU, on which tensors are made by default; where there are more ranks than
    GPUs they share them, if NCCL allows it.

    What the ranks raised is raised here, the first to fail first, and how a rank ended that raised nothing. Give one
    function many cases: two ranks cost a tenth of a second, eight of them half of one.
    """
    # A store in a file would do as well, but looking into it takes longer than anything that ranks do here.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            (world, backend, function, arguments, folder, store.port),
            nprocs=world,
            join=False,
            start_method="forkserver",
        )
        try:
            while not context.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            failures = [file.read_text() for file in sorted(Path(folder).glob("failure-*"), key=_written)]
            ended = [f"rank {rank} ended with {p.exitcode}" for rank, p in enumerate(context.processes)]
            raise AssertionError("\n".join([*failures, *ended])) from None
        finally:  # whoever presses Ctrl-C: the ranks do not hear it
            for process in context.processes:
                process.kill()
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: str,
    port: int,
) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server that forks ranks is deaf to it
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    try:
        dist.init_process_group(
            backend, store=dist.TCPStore("127.0.0.1", port, wait_for_workers=False), rank=rank, world_size=world,
            timeout=timedelta(seconds=60), device_id=_take_gpu(rank, world) if backend == "nccl" else None,
        )  # fmt: skip
        result = function(*arguments)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        (Path(folder) / f"failure-{rank}").write_text(f"rank {rank} of {world}:\n{traceback.format_exc()}")
        if backend == "nccl":
            os._exit(1)  # Python's own way out would wait for collectives that never end
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns


def _take_gpu(rank: int, world: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if world > gpus:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on; before, it refuses
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return device
