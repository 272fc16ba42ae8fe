"""Checks of all ranks together: what each node found, and the speed of all-reduce."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import gather_rows
from imagenet_fast.doctor import host_checks
from imagenet_fast.doctor.report import CheckResult, by_host, write_results
from imagenet_fast.netlab.timing import time_repetitions
from imagenet_fast.recipe.job import DoctorJob

_SHORT, _LONG, _LONG_ON_GPUS = 2**13, 2**25, 2**27  # bytes; a fast network needs long messages to be full
_REPEATS, _ROUNDS = 20, 5


def examine_all(job: DoctorJob, world: DistContext, file: Path) -> None:
    """Check every node and what is between them; rank 0 writes the results to ``file``. Every rank must call it."""
    own = []
    here.enter("data")
    if world.is_local_main:  # when all have come: to look through the data of a slow server may take long
        own = host_checks.examine(job.data, job.out, world.local_size)
    found = gather_results(own, world, socket.gethostname())
    if world.is_main:
        write_results(found, file)


def gather_results(own: list[CheckResult], world: DistContext, host: str) -> list[CheckResult]:
    """Return what local rank 0 of every node (``own``, on its ``host``) found, and the results between ranks."""
    told: list[tuple[str, list[CheckResult]] | None] = [None] * world.size
    dist.all_gather_object(told, (host, own) if world.is_local_main else None)
    found: dict[str, list[CheckResult]] = {}
    for number, (name, results) in enumerate(filter(None, told)):
        found[name if name not in found else f"{name} ({number})"] = results
    return [*by_host(found), *_network(world)]


def _network(world: DistContext) -> Iterator[CheckResult]:
    if world.size == 1:
        yield CheckResult("all-reduce", "ok", "one rank alone needs none")
        return
    size = _LONG_ON_GPUS if world.device.type == "cuda" else _LONG
    seconds = _seconds(_SHORT, _REPEATS, world), _seconds(size, 1, world)
    latency_s, long_s = gather_rows(seconds).amax(0).tolist()
    rate = 8 * 2 * (world.size - 1) / world.size * size / long_s
    measured = f"{rate / 1e9:.2f} Gbit/s and {1e6 * latency_s:.0f} us over {world.size} ranks"
    yield CheckResult("all-reduce", "ok", measured)


def _seconds(size: int, repeats: int, world: DistContext) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes: the median of several rounds after a first."""
    once = partial(dist.all_reduce, torch.zeros(size // 4, device=world.device))
    wait = torch.get_device_module(world.device).synchronize
    rounds = [time_repetitions(once, repeats, wait, warm_up=False) for _ in range(1 + _ROUNDS)]
    return median(block.latency_s for block in rounds[1:])
