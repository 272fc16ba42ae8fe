"""Joining the process group and leaving it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imagenet_fast.distributed.bootstrap import connecting, rendezvous_ranks
from imagenet_fast.distributed.cpu_count import own_cores
from imagenet_fast.distributed.flight_recorder import record_flights
from imagenet_fast.distributed.numa import bind_to_numa_node
from imagenet_fast.distributed.process_groups import SLACK_S
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.distributed.watchdog import watching_ranks
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.schema import Timeout


@dataclass(frozen=True)
class DistContext(RankInfo):
    """This process among all of them, and what it computes on."""

    device: torch.device
    cores: int = 1
    """Processors for this rank."""


@contextmanager
def join(
    place: RankInfo, agreed: Mapping[str, Any], patience: timedelta, timeout: Timeout | None = None,
    end: Callable[[str], None] = lambda sentence: None, traces: Path | None = None, left: Path | None = None,
    numa_binding: bool = True,
) -> Iterator[DistContext]:  # fmt: skip
    """Join the process group that torchrun's environment describes: NCCL where there are GPUs, else gloo.

    The others are waited for with ``patience``; later on a rank that stands still for longer than ``timeout`` allows
    is named, and all end: ``end`` is told why, by another thread, where this one is stuck. NCCL leaves its last
    operations in ``traces``, and this rank in ``left`` where it was last. With ``numa_binding`` it keeps to the cores
    beside its GPU. Raises UserError where the ranks do not come together, or disagree in what should be ``agreed``
    among them.
    """
    timeout = timeout or Timeout()
    device, backend = prepare_device(place.local_rank, traces)
    if numa_binding and device.type == "cuda":
        bind_to_numa_node(device)
    store = rendezvous_ranks(place, agreed, patience, device.type)
    with connecting(place, store, patience):
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size,
            timeout=timedelta(seconds=timeout.first_step_s + SLACK_S),
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
    with watching_ranks(timeout, end, left):
        yield DistContext(place.rank, place.size, place.local_rank, place.local_size, device, own_cores(place, store))
    dist.destroy_process_group()  # not after an error: it would wait for collectives that never end


def prepare_device(local_rank: int, traces: Path | None = None) -> tuple[torch.device, str]:
    """This rank's GPU, set up for speed, and the backends for it; the CPU and gloo where there is none.

    Beside NCCL gloo connects to a rank only when asked to reach it, unless ``TORCH_GLOO_LAZY_INIT`` is set already.
    NCCL's last operations are left in ``traces`` where one never ends. Raises UserError where there are more ranks than
    GPUs, and where torch cannot use those that there are.
    """
    gpus = torch.cuda.device_count()
    if not torch.cuda.is_available():
        if gpus:
            raise UserError(
                f"this node has {gpus} GPUs that torch cannot use ({_reason()}); `imagenet-fast doctor` says what to "
                "do, and CUDA_VISIBLE_DEVICES= in the environment trains on the CPU"
            )
        return torch.device("cpu"), "gloo"
    if local_rank >= gpus > 1:
        raise UserError(f"this node has {gpus} GPUs and more ranks than that; start at most one rank a GPU")
    # Several communicators are at work at once: NCCL is to start their kernels in the order in which we call them, and
    # the driver to have a queue for each stream.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = torch.device("cuda", local_rank if gpus > 1 else 0)  # srun may show each of its tasks one GPU only
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    # What we send lies on the GPU, barriers too (`join` binds the group to its device): gloo is there for a program
    # around us that sends from a CPU, and would otherwise hold a socket to every rank, once a group. NCCL alone tries
    # the connections at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    record_flights(traces)
    return device, "cpu:gloo,cuda:nccl"


def _reason() -> str:
    """Why torch does not come to use CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return "it does not say why"
