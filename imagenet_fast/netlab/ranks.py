"""Run ranks for a measurement on the nodes of a shaped network, or all on this node.

Ranks of one node use its loopback interface, whatever interface gloo is configured with, because the kernel sends
packets to its own addresses that way. So only traffic to other nodes is shaped, and counted on the link.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from imagenet_fast.distributed.cores import usable_memory
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError
from imagenet_fast.netlab.forks import ForkedRanks
from imagenet_fast.netlab.namespaces import INTERFACE, Host, enter, parse_rate, shaped_network
from imagenet_fast.progress import measurement_bar

TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective."""

_RANK_BYTES = 10 * 2**20  # memory of an idle forked rank itself, measured with torch 2.15


@dataclass(frozen=True)
class Lab:
    """The place of a measurement: ranks on simulated nodes, or all on this one."""

    hosts: int
    """Number of nodes."""
    ranks_per_host: int
    """Ranks on each node."""
    rate: str | None = None
    """Rate of each node's link in tc's notation; None: no network is made, and all ranks are on this node."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def run(self, function: Callable[..., Any], *arguments: Any, gpus: bool = False) -> list[Any]:
        """Call ``function(*arguments)`` on every rank, each a process with one thread, and return the results by rank.

        Ranks have torchrun's environment variables, and a process group. A bar shows what rank 0 reports with
        ``report_progress``.

        Args:
            function: A module-level function; its result must be picklable.
            *arguments: Its arguments.
            gpus: Whether each rank has a GPU of this node and uses NCCL; otherwise the backend is gloo.

        Raises:
            UserError: The network cannot be made.
            RankError: The function failed on a rank.
        """
        network = nullcontext() if self.rate is None else shaped_network(self.hosts, parse_rate(self.rate))
        with network as hosts, tempfile.TemporaryDirectory() as folder, measurement_bar() as show:
            join = self.ranks, hosts, self.ranks if hosts is None else self.ranks_per_host, folder, gpus
            with closing(ForkedRanks(self.ranks, _rank, *join, preload=function.__module__)) as ranks:
                return ranks.run(function, *arguments, show=show)

    def check_memory(self, each: float, what: str, advice: str) -> None:
        """Raise UserError if memory does not suffice for ``each`` bytes a rank.

        Args:
            each: Bytes of a rank, beside those of an idle one.
            what: What takes them, in the plural, for the error message.
            advice: What to do about it.
        """
        needed, free = self.ranks * (_RANK_BYTES + each), usable_memory()
        if needed > free:
            raise UserError(
                f"{what} take {needed / 2**30:.1f} GiB of memory at least, and {free / 2**30:.1f} are free; {advice}"
            )


def on_gpus(device: str | None, ranks: int, called: str = "ranks", option: str = "--nodes") -> bool:
    """Return whether each rank gets a GPU of this node.

    Args:
        device: "cpu" means no and "cuda" yes. None means yes if there are at least ``ranks`` GPUs.
        ranks: Number of ranks on this node.
        called: Word for ranks in the error message.
        option: Command line option for the number of ranks, for the error message.

    Raises:
        UserError: ``device`` is "cuda" and there are too few GPUs.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < ranks:
        raise UserError(f"--device cuda: there are {gpus} GPUs for {ranks} {called}; give fewer {option}")
    return device == "cuda" or (device is None and gpus >= ranks)


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
