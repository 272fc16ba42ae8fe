"""Join and leave the process group."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from imagenet_fast.distributed.board import Board
from imagenet_fast.distributed.cores import bind_to_numa_node, cpu_quotas, raise_open_files, task_cores
from imagenet_fast.distributed.groups import SLACK_S, leave_at_exit
from imagenet_fast.distributed.join import connecting, introduce
from imagenet_fast.distributed.ranks import RankInfo, is_task, rank_info_from_env, refuse_mpirun, srun_to_torchrun_env
from imagenet_fast.distributed.watchdog import Reason, watching_ranks
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.schema import Timeout

_JOIN_TIMEOUT_S = 300.0  # for ranks of a user's own loop
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt(3): freed bytes at the heap's end, and bytes of an allocation, from which on memory goes
back to the kernel."""


@dataclass(frozen=True)
class DistContext(RankInfo):
    """This process among all ranks, and the device it computes on."""

    device: torch.device
    bf16: bool
    """True if the devices of all ranks have instructions for bf16."""
    cores: int = 1
    """Number of processors for this rank."""


@contextmanager
def init_distributed(
    place: RankInfo, agreed: Mapping[str, Any], join_timeout_s: float, timeout: Timeout,
    end: Callable[[Reason], int] = lambda reason: 1, traces: Path | None = None, left: Path | None = None,
    numa_binding: bool = True,
) -> Iterator[DistContext]:  # fmt: skip
    """Join the process group that torchrun's environment describes: NCCL if there are GPUs, else gloo.

    Args:
        place: This process's rank.
        agreed: Settings that must be equal on all ranks.
        join_timeout_s: Seconds to wait for the other ranks at the start.
        timeout: How long a rank may make no progress later on. Then it is named, and all ranks end.
        end: Called with the reason, in another thread, if this rank must end while it is stuck; returns the exit code.
        traces: Directory for NCCL's last operations if this rank is stuck; None for nowhere.
        left: File where this rank leaves its last position; None for nowhere.
        numa_binding: Whether to keep this process to the cores next to its GPU.

    Yields:
        This rank's context.

    Raises:
        UserError: If the ranks do not meet, or disagree in ``agreed``.
        JobAborted: If another rank is lost.
    """
    device, backend = prepare_device(place.local_rank)
    if numa_binding and device.type == "cuda":
        bind_to_numa_node(device)
    limit = timedelta(seconds=max(timeout.first_step_s, timeout.step_s) + SLACK_S)
    _make_group(place, device, backend, join_timeout_s, agreed, limit)
    with watching_ranks(timeout, end, left, traces):
        yield _context(place, device)
    dist.destroy_process_group()  # not after an error: it would wait for collectives that never end


def current_world() -> DistContext:
    """Return this process among all ranks, for code of one's own. Every rank must call this.

    The process group is the one that exists. Else it is made: of the ranks that torchrun or srun has started, or of
    this process alone.

    Raises:
        UserError: The ranks do not meet, or do not know their numbers, as processes that mpirun has started.
    """
    there = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
    if not there or is_task(rank, size):
        srun_to_torchrun_env(os.environ, chosen=True, one_a_node=True)
    if (place := rank_info_from_env()) is None:
        if not there:
            refuse_mpirun()
        place = RankInfo(rank, size, rank, size)
    device, backend = prepare_device(place.local_rank)
    if not there:
        _make_group(place, device, backend, _JOIN_TIMEOUT_S, {}, None)
        if device.type == "cpu":
            leave_at_exit()
    return _context(place, device)


def _make_group(
    place: RankInfo, device: torch.device, backend: str, join_timeout_s: float, agreed: Mapping[str, Any],
    limit: timedelta | None,
) -> None:  # fmt: skip
    """Meet the other ranks, and make the group of all; ``limit`` is that of its operations, None for torch's."""
    store = HashStore() if place.size == 1 else introduce(place, agreed, join_timeout_s, device.type)
    with connecting(place, store, join_timeout_s):
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip


def _context(place: RankInfo, device: torch.device) -> DistContext:
    rank, size = dist.get_rank(), dist.get_world_size()
    return DistContext(
        rank, size, place.local_rank, place.local_size, device, all_compute_bf16(device), own_cores(place)
    )


def own_cores(place: RankInfo) -> int:
    """Return how many of its node's processors are for this rank. All ranks of the node must call this.

    Ranks that may use the same cores divide them evenly. If srun or NUMA binding has given each rank cores of its own,
    the rank gets all of them. The limit of a cgroup, or of a task that has started several ranks, is divided evenly.
    """
    # Neither torchrun nor srun has said the node if an mpirun or a script started this rank. Engines read it too.
    node = os.environ.setdefault("GROUP_RANK", str(place.rank - place.local_rank))
    board = Board(dist.distributed_c10d._get_default_store(), f"cores/{node}")
    own = sorted(os.sched_getaffinity(0))
    board.post(f"rank/{place.local_rank}", own)
    of_ranks = board.gather("rank", range(place.local_size), time.monotonic() + _JOIN_TIMEOUT_S)
    share = len(own) // [*of_ranks.values()].count(own)
    if (given := task_cores()) is not None:
        share = min(share, given if is_task(place.rank, place.size) else given // place.local_size)
    return max(1, min([share, *(math.ceil(quota) // place.local_size for quota in cpu_quotas())]))


def prepare_device(local_rank: int) -> tuple[torch.device, str]:
    """Return this rank's GPU, set up for speed, and the backends for it; or the CPU and gloo if there is no GPU.

    With a GPU, gloo is a second backend. It connects to a rank only when a message is sent to it, unless
    ``TORCH_GLOO_LAZY_INIT`` is already set.

    Args:
        local_rank: Number of this rank on its node.

    Raises:
        UserError: If there are more ranks than GPUs, or torch cannot use the GPUs.
    """
    raise_open_files()
    gpus = torch.cuda.device_count()
    if not torch.cuda.is_available():
        if gpus:
            raise UserError(
                f"this node has {gpus} GPUs that torch cannot use; `imagenet-fast doctor` says why, and "
                "CUDA_VISIBLE_DEVICES= in the environment trains on the CPU"
            )
        _keep_freed_memory()
        return torch.device("cpu"), "gloo"
    if local_rank >= gpus > 1:
        raise UserError(f"this node has {gpus} GPUs and more ranks than that; start at most one rank a GPU")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share queues of the driver
    device = torch.device("cuda", local_rank if gpus > 1 else 0)  # srun may show each of its tasks only one GPU
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    # What we send in steps is on the GPU, barriers too (`init_distributed` binds the group to its device). Gloo serves
    # objects, which torch sends from the CPU where it can, and a calling program; if not lazy, it would hold a socket
    # to every rank for each group. So only NCCL tests the connections at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    return device, "cpu:gloo,cuda:nccl"


def computes_bf16(device: torch.device) -> bool:
    """Return whether ``device`` has instructions for bf16, as GPUs have from Ampere on and CPUs with AVX-512.

    Other CPUs convert each value by itself: a convolution in bf16 took 9.6 times as long as in fp32 with AVX2. For
    other GPUs torch has no convolutions of cuDNN's in bf16.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not public; torch has no other way to ask
    return device.type != "cpu" or (torch.backends.mkldnn.is_available() and asked is not None and bool(asked()))


def all_compute_bf16(device: torch.device) -> bool:
    """Return whether the devices of all ranks have instructions for bf16. Every rank must call this.

    Ranks must agree, since those of a layout send each other what they have computed.
    """
    lacking = torch.tensor(not computes_bf16(device), dtype=torch.int32, device=device)
    dist.all_reduce(lacking)
    return not lacking


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones, unless the environment sets its malloc.

    By default large tensors go back to the kernel, which clears their pages again at each step: up to a sixth of a
    step's time on the CPU (docs/notes/tried.md). A rank keeps its peak instead, which it reaches at every step.
    """
    is_set = any(name.startswith("MALLOC_") or "glibc.malloc" in value for name, value in os.environ.items())
    if platform.libc_ver()[0] == "glibc" and not is_set:
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)
