"""Run ranks for a measurement on the nodes of a shaped network, or all on this node.

Ranks of one node use its loopback interface, whatever interface gloo is configured with, because the kernel sends
packets to its own addresses that way. So only traffic to other nodes is shaped, and counted on the link.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from imagenet_fast.bench.forks import RankPool
from imagenet_fast.bench.netns import INTERFACE, Host, enter
from imagenet_fast.bench.progress import measurement_bar
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError

TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective."""


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
        RankError: The function failed on a rank.
    """
    count = ranks_each * (1 if hosts is None else len(hosts))
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RankPool(count, _rank, count, hosts, ranks_each, folder, gpus, preload=function.__module__)) as ranks,
        measurement_bar() as show,
    ):
        return ranks.run(function, *arguments, show=show)


@contextmanager
def _rank(rank: int, count: int, hosts: list[Host] | None, ranks_each: int, folder: str, gpus: bool) -> Iterator[None]:
    """Join the process group, in a process of the pool."""
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
    yield
