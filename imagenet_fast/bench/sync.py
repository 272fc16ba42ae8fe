"""How near each engine comes to what the wire and the compute allow, on a network of one's own.

A layer profile is replayed against every engine in turn, several rounds of it, so that all meet the same noise. A
block is a step to get going, the measured steps, and a settling that is not timed; in between, what one step leaves
to the next forward is counted there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import assert_never

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from imagenet_fast.bench.hosts import run_on
from imagenet_fast.bench.network import parse_rate, sent_bytes, shaped_network
from imagenet_fast.bench.profile import Profile
from imagenet_fast.bench.replay import Gradients, gradients_of, replay
from imagenet_fast.recipe import (
    AllReduceSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    RingSync,
    SparseSync,
    Sync,
    Wire,
)
from imagenet_fast.sync import SyncStats, attach, wire_dtype
from imagenet_fast.tables import compact_table


_LEARNING_STEPS = 6  # until an engine that plans has its plan


@dataclass(frozen=True)
class EngineTime:
    """One engine's steps: medians over the rounds, seconds and bytes a step of one host (their mean)."""

    engine: str
    wire: Wire
    hosts: int
    rate: str | None
    scale: int
    model: str
    step_s: float
    step_s_min: float
    step_s_max: float
    compute_s: float
    """A step of the same model without any synchronisation."""
    exposed_s: float
    """What the step lasts longer than that."""
    raw_s: float
    """One all-reduce of the backend's of as many elements of the wire dtype, with nothing else going on."""
    limit_s: float
    """The least such an engine could take, from compute and raw."""
    sent_bytes: int
    """By the engine's own count."""
    kernel_bytes: int | None
    """By the counters of the hosts' interfaces; None on the loopback interface, which all ranks share."""
    launches: float
    ratio_to_ddp: float
    """How many times faster than DDP with the same wire dtype."""
    ratio_to_limit: float
    """How many times the limit it takes."""


@dataclass(frozen=True)
class _Block:
    """Means over the steps of one block, on one rank."""

    step_s: float
    sent_bytes: float = 0
    kernel_bytes: float = 0
    launches: float = 0


def bench_sync(
    profile: Profile, engines: list[Sync], hosts: int, rate: str | None, scale: int, rounds: int, steps: int
) -> list[EngineTime]:
    """Replay ``profile``, with a ``scale``-th of its gradients, on ``hosts`` linked at ``rate`` (None: loopback).

    DDP is run with each wire dtype there is. Raises UserError where the network cannot be made.
    """
    wires = list(dict.fromkeys(settings.wire for settings in engines))
    engines = engines + [ddp for wire in wires if (ddp := DdpSync(wire=wire)) not in engines]
    small = profile.shrunk(scale)
    with shaped_network(hosts, parse_rate(rate)) if rate is not None else nullcontext(hosts) as network:
        by_rank: list[dict[Sync | Wire | None, list[_Block]]] = run_on(
            network, _measure, small, engines, wires, rate is not None, rounds, steps
        )
    seconds = {
        key: [max(of_host[key][turn].step_s for of_host in by_rank) for turn in range(rounds)] for key in by_rank[0]
    }
    compute = median(seconds[None])
    ddp_s = {wire: median(seconds[DdpSync(wire=wire)]) for wire in wires}

    def row(settings: Sync) -> EngineTime:
        times, wire = seconds[settings], settings.wire
        raw = median(seconds[wire])
        limit = limit_s(settings, compute, profile.forward_s / profile.compute_s, raw)

        def over_hosts(field: str) -> float:
            return median(
                fmean(getattr(of_host[settings][turn], field) for of_host in by_rank) for turn in range(rounds)
            )

        return EngineTime(
            settings.kind, wire, hosts, rate, scale, profile.model, median(times), min(times), max(times), compute,
            median(times) - compute, raw, limit, round(over_hosts("sent_bytes")),
            round(over_hosts("kernel_bytes")) if rate is not None else None, over_hosts("launches"),
            ddp_s[wire] / median(times), median(times) / limit,
        )  # fmt: skip

    return [row(settings) for settings in engines]


def limit_s(settings: Sync, compute_s: float, forward_share: float, raw_s: float) -> float:
    """The least a step can take: all that an engine of this kind may overlap, perfectly overlapped.

    ``raw_s`` is one undisturbed all-reduce of all gradients.
    """
    forward = forward_share * compute_s
    match settings:
        case AllReduceSync():
            return compute_s + raw_s
        case DdpSync() | RingSync() | LazySync():
            return forward + max(compute_s - forward, raw_s)
        case SparseSync():
            return forward + max(compute_s - forward, (1 - settings.sparsity) * raw_s)
        case HybridSync() | DearSync():
            return max(compute_s, raw_s)
        case _:
            assert_never(settings)


def sync_table(times: list[EngineTime]) -> Table:
    """One row an engine, below what compute and the wire take alone."""
    return compact_table(
        ("engine", "wire"),
        ("s a step", "spread", "exposed", "sent MB", "kernel MB", "launches", "x DDP", "x limit"),
        (
            (
                t.engine, t.wire, f"{t.step_s:.3f}", f"{t.step_s_min:.2f}-{t.step_s_max:.2f}", f"{t.exposed_s:.3f}",
                f"{t.sent_bytes / 1e6:.1f}", "-" if t.kernel_bytes is None else f"{t.kernel_bytes / 1e6:.1f}",
                f"{t.launches:.0f}", f"{t.ratio_to_ddp:.2f}", f"{t.ratio_to_limit:.3f}",
            )
            for t in times
        ),
    )  # fmt: skip


def _measure(
    profile: Profile, engines: list[Sync], wires: list[Wire], counted: bool, rounds: int, steps: int
) -> dict[Sync | Wire | None, list[_Block]]:
    """On each rank: blocks of every engine, of a raw all-reduce by wire dtype, and of compute alone (None)."""
    gradients = gradients_of(profile)
    measurements: dict[Sync | Wire | None, Callable[[], _Block]] = {
        None: lambda: _compute_block(profile, gradients, steps)
    }
    for wire in wires:
        message = torch.zeros(profile.elements, dtype=wire_dtype(wire))
        measurements[wire] = partial(_raw_block, message)
    for settings in engines:
        measurements[settings] = _engine_block(profile, gradients, settings, counted, steps)
    blocks: dict[Sync | Wire | None, list[_Block]] = defaultdict(list)
    for turn in range(rounds):
        order = list(measurements)
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            dist.barrier()
            blocks[key].append(measurements[key]())
    return dict(blocks)


def _compute_block(profile: Profile, gradients: Gradients, steps: int) -> _Block:
    model, x = replay(profile, gradients), torch.zeros(1, requires_grad=True)
    begun = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).backward()
    return _Block((time.perf_counter() - begun) / steps)


def _raw_block(message: Tensor) -> _Block:
    dist.all_reduce(message)  # so that connections are as busy as between steps: TCP slows down where it was idle
    begun = time.perf_counter()
    dist.all_reduce(message)
    return _Block(time.perf_counter() - begun)


def _engine_block(
    profile: Profile, gradients: Gradients, settings: Sync, counted: bool, steps: int
) -> Callable[[], _Block]:
    forward, sync = attach(replay(profile, gradients), settings)
    x = torch.zeros(1, requires_grad=True)

    def step() -> SyncStats:
        sync.zero_grad()
        forward(x).backward()
        stats = sync.finish()
        sync.update(lambda params: None)
        return stats

    def block() -> _Block:
        before = sent_bytes() if counted else 0
        stats = [step()]
        begun = time.perf_counter()
        stats += [step() for _ in range(steps)]
        seconds = time.perf_counter() - begun
        sync.settle()
        dist.barrier()
        kernel = sent_bytes() - before if counted else 0
        every = steps + 1
        return _Block(
            seconds / steps,
            sum(s.sent_bytes for s in stats) / every,
            kernel / every,
            sum(s.launches for s in stats) / every,
        )

    for _ in range(_LEARNING_STEPS if isinstance(settings, HybridSync | DearSync) else 1):
        step()
    sync.settle()
    return block
