"""Joining the process group and leaving it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from imagenet_fast.errors import UserError
from imagenet_fast.ranks.introduction import connecting, introduce
from imagenet_fast.ranks.place import Place
from imagenet_fast.ranks.roll_call import answering_roll_calls


@dataclass(frozen=True)
class World(Place):
    """This process among all of them, and what it computes on."""

    device: torch.device


@contextmanager
def join(
    place: Place, agreed: Mapping[str, Any], patience: timedelta, timeout: timedelta = timedelta(minutes=10)
) -> Iterator[World]:
    """Join the process group that torchrun's environment describes: NCCL where there are GPUs, else gloo.

    The others are waited for with ``patience``, and every collective later on until ``timeout``. Raises UserError
    where the ranks do not come together, or disagree in what should be ``agreed`` among them.
    """
    device, backend = prepare_device(place.local_rank)
    store = introduce(place, agreed, patience)
    with connecting(place, store, patience):
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
    with answering_roll_calls():
        yield World(place.rank, place.size, place.local_rank, place.local_size, device)
    dist.destroy_process_group()  # not after an error: it would wait for collectives that never end


def prepare_device(local_rank: int) -> tuple[torch.device, str]:
    """This rank's GPU, set up for speed, and the backends for it; the CPU and gloo where there is none.

    Beside NCCL gloo connects to a rank only when asked to reach it, unless ``TORCH_GLOO_LAZY_INIT`` is set already.
    Raises UserError where there are more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    if local_rank >= gpus > 1:
        raise UserError(f"this node has {gpus} GPUs and more ranks than that; start at most one rank a GPU")
    device = torch.device("cuda", local_rank if gpus > 1 else 0)  # srun may show each of its tasks one GPU only
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    # What we send lies on the GPU, barriers too (`join` binds the group to its device): gloo is there for a program
    # around us that sends from a CPU, and would otherwise hold a socket to every rank, once a group. NCCL alone tries
    # the connections at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    return device, "cpu:gloo,cuda:nccl"
