"""Run ranks for a measurement on the nodes of a shaped network, or all on this node.

Ranks of one node use its loopback interface, whatever interface gloo is configured with, because the kernel sends
packets to its own addresses that way. So only traffic to other nodes is shaped, and counted on the link.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.bench.netns import INTERFACE, Host, enter
from imagenet_fast.data.progress import Show, measurement_bar
from imagenet_fast.distributed.forkserver import end_with_starter, freeze_gc, start_fork_server
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.errors import UserError

TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective."""

_LOOK_S = 1.0  # between two looks at how far process 0 has come

_progress_file: Path | None = None
"""The file to which process 0 of a measurement writes its progress; None in all other processes."""


def on_gpus(device: str | None, ranks: int, called: str = "ranks", option: str = "--hosts") -> bool:
    """Return whether each rank gets a GPU of this node.

    Args:
        device: "cpu" means no and "cuda" yes. None means yes if there are at least ``ranks`` GPUs.
        ranks: Number of ranks on this node.
        called: Word for ranks in the error message.
        option: Command line option for the number of ranks, for the error message.

    Raises:
        UserError: ``device`` is "cuda" and there are too few GPUs, or ``device`` is unknown.
    """
    gpus = torch.cuda.device_count()
    match device:
        case "cpu":
            return False
        case "cuda":
            if gpus < ranks:
                raise UserError(f"--device cuda: there are {gpus} GPUs for {ranks} {called}; give fewer {option}")
            return True
        case None:
            return gpus >= ranks
        case _:
            raise UserError(f"--device {device} is neither cpu nor cuda; write one of them")


def run_on(
    hosts: list[Host] | None, ranks_each: int, function: Callable[..., Any], *arguments: Any, gpus: bool = False
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank, each a process with one thread, and return the results by rank.

    Ranks have torchrun's environment variables, and a process group.

    Args:
        hosts: Nodes of a shaped network; None means this node only.
        ranks_each: Ranks on each node.
        function: A module-level function; its result must be picklable.
        *arguments: Its arguments.
        gpus: Whether each rank has a GPU of this node and uses NCCL; otherwise the backend is gloo.

    Raises:
        ProcessRaisedException: A rank failed (torch's exception, with the traceback of the first that failed).
    """
    count = ranks_each * (1 if hosts is None else len(hosts))
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(
            count, function.__module__, _rank,
            count, hosts, ranks_each, folder, gpus, function, arguments,
        )  # fmt: skip


def _rank(
    rank: int,
    count: int,
    hosts: list[Host] | None,
    ranks_each: int,
    folder: str,
    gpus: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Initialise the process group in this process and call ``function``."""
    node, local_rank = divmod(rank, ranks_each)
    os.environ.update(RankInfo(rank, count, local_rank, ranks_each).variables(node))
    if hosts is not None:
        enter(hosts[node])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    device, backend = prepare_device(local_rank) if gpus else (torch.device("cpu"), "gloo")
    dist.init_process_group(
        backend, store=FileStore(f"{folder}/store", count), rank=rank, world_size=count, timeout=TIMEOUT,
        device_id=device if gpus else None,
    )  # fmt: skip
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result


def in_processes(
    count: int, module: str, function: Callable[..., Any], *arguments: Any, show: Show | None = None
) -> list[Any]:
    """Call ``function(number, *arguments)`` in ``count`` processes with one thread each, with a progress bar.

    Args:
        count: Number of processes.
        module: Module that the fork server imports for them; it has an effect only before the first fork.
        function: A module-level function; its result must be picklable.
        *arguments: Its arguments after the process's number.
        show: Moves a bar by what process 0 reports with ``report_progress``; None: a new bar.

    Returns:
        The results, by number.

    Raises:
        ProcessRaisedException: A process failed (torch's exception, with the traceback of the first that failed).
    """
    start_fork_server(module)
    with tempfile.TemporaryDirectory() as folder, nullcontext(show) if show is not None else measurement_bar() as move:
        context = start_processes(
            _process, (folder, function, arguments), nprocs=count, join=False, daemon=True, start_method="forkserver"
        )
        assert context is not None
        try:
            while not context.join(_LOOK_S if sys.stderr.isatty() else None):
                if (told := Path(folder) / "progress").exists():
                    move(*json.loads(told.read_text(encoding="utf-8")))
        finally:
            for process in context.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(number)).read_bytes()) for number in range(count)]


def report_progress(text: str, done: int, total: int) -> None:
    """Report to the parent process what is done now, and that ``done`` of ``total`` is finished.

    Only reports of process 0 are shown. Call this between measurements, not inside.
    """
    if _progress_file is not None:
        atomic_write_text(_progress_file, json.dumps([text, done, total]))


def _process(number: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call ``function`` in this process and pickle its result into ``folder``."""
    global _progress_file
    _progress_file = Path(folder) / "progress" if number == 0 else None
    end_with_starter()
    freeze_gc()
    torch.set_num_threads(1)
    (Path(folder) / str(number)).write_bytes(pickle.dumps(function(number, *arguments)))
