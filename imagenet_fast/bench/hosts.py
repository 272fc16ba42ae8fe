"""Ranks for a measurement: on the hosts of a shaped network, or all on this machine.

Ranks of one host reach each other by its loopback interface, whatever interface gloo is told: the kernel sends what is
addressed to itself nowhere else. So only what goes to other hosts is shaped, and counted on the link.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from imagenet_fast.bench.netns import INTERFACE, Host, enter
from imagenet_fast.bench.processes import in_processes
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.errors import UserError

TIMEOUT = timedelta(minutes=5)
"""How long a collective may take."""


def on_gpus(device: str | None, ranks: int, called: str = "ranks", option: str = "--hosts") -> bool:
    """Whether that many ``ranks`` of this machine have a GPU each: asked for by ``device`` "cuda", or with None where
    there are as many. Raises UserError in the words of a command, where they are ``called`` something and ``option``
    says how many."""
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
    """``function(*arguments)`` on ``ranks_each`` gloo ranks a host, with one thread each; what they returned, by rank.

    Without ``hosts`` this machine is the only one; with ``gpus`` each rank has one of its GPUs, and NCCL. Each finds
    torchrun's variables in its environment. Raises torch's ProcessRaisedException with the traceback of the first rank
    that failed.
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
