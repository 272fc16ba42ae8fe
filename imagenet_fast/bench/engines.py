"""Measure how near each engine is to the limit set by link and compute, on a simulated network.

A layer profile is replayed with every engine in turn, for several rounds, so that all are measured under the same
noise. A block is one warm-up step, the timed steps, and a final wait that is not timed. Communication that one step
leaves to the next step's forward is counted in that next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from imagenet_fast.bench.collectives import NetworkRow, averaging
from imagenet_fast.bench.replay import Gradients, gradients_of, replay, with_moves
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.step_simulator import Prediction, step_lower_bound
from imagenet_fast.distributed.cores import freeze_gc
from imagenet_fast.metrics.tables import column
from imagenet_fast.metrics.trace import Trace
from imagenet_fast.netlab.forks import report_progress
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.netlab.timing import bytes_on_link, in_turns, time_repetitions
from imagenet_fast.parallel.ddp import attach
from imagenet_fast.recipe.sync_config import DdpSync, Sync
from imagenet_fast.recipe.sync_table import Cast, Wire
from imagenet_fast.sync import SyncStats, declare
from imagenet_fast.sync.all_reduce import wire_dtype, wire_for
from imagenet_fast.sync.bucket_scheduler import step_model
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import slots_of
from imagenet_fast.sync.quantization import PLAIN, is_coded
from imagenet_fast.sync.topology import Topology

_LEARNING_STEPS = 7  # one to learn the order, five to watch, and one under the plan


@dataclass(frozen=True)
class EngineTime(NetworkRow):
    """One engine's step: medians over the rounds.

    Times are in seconds per step. Bytes are per step and node: the mean over the nodes.
    """

    note = "vs DDP: DDP's time divided by the engine's. vs limit: the engine's time divided by the least possible."

    engine: str = field(metadata=column("engine"))
    """Name of the engine."""
    wire: Wire = field(metadata=column("wire"))
    """Wire dtype."""
    scale: int
    """Factor by which tensors are smaller than in the model."""
    model: str
    """Layer profile that was replayed."""
    step_s: float = field(metadata=column("", "s/step", ".3f"))
    """Step time."""
    step_s_min: float = field(metadata=column("fastest", form=".3f"))
    """That of the fastest round."""
    step_s_max: float = field(metadata=column("slowest", form=".3f"))
    """That of the slowest round."""
    compute_s: float = field(metadata=column("compute", form=".3f"))
    """Step time of the same model without any synchronisation."""
    exposed_s: float = field(metadata=column("exposed", form=".3f"))
    """Exposed communication: ``step_s`` minus ``compute_s``."""
    raw_s: float = field(metadata=column("raw", form=".3f"))
    """Time of one all-reduce of as many elements of the wire dtype, with no other work: the fastest of all rounds.

    It is the backend's own all-reduce. If nodes have several ranks, it is our hierarchical one, because the backend
    does not know the nodes.
    """
    limit_s: float
    """Lower bound for such an engine, whatever its order of sends (see ``step_lower_bound``)."""
    sent_bytes: int = field(metadata=column("sent", "MB", ".1f"))
    """Bytes sent by all ranks of a node, by the engine's count; includes bytes sent inside the node."""
    kernel_bytes: int | None = field(metadata=column("link", "MB", ".1f"))
    """Bytes sent by the node, by its link's counter; excludes bytes sent inside the node.

    None on the loopback interface, which all ranks share.
    """
    launches: float
    """Collectives that one rank starts per step."""
    ratio_to_ddp: float = field(metadata=column("vs DDP", form=".2f"))
    """DDP's step time over ``step_s``, with the same wire dtype; DDP uses bf16 if that is int8."""
    ratio_to_limit: float = field(metadata=column("vs limit", form=".3f"))
    """``step_s`` over ``limit_s``."""
    predicted_s: float = field(metadata=column("predicted", form=".3f"))
    """Step time that the cost model predicts from the profile's times and the network measured beforehand."""

    @property
    def title(self) -> str:
        """Describe what was replayed and where, such as ``1/4 of alexnet, 4 nodes of 2 ranks, 250mbit``."""
        return f"{f'1/{self.scale} of ' if self.scale > 1 else ''}{self.model}, {self.network}"


@dataclass(frozen=True)
class _Block:
    """Means over the steps of one block on one rank."""

    step_s: float
    sent_bytes: float = 0
    kernel_bytes: float = 0
    """Bytes sent over the link of the rank's node."""
    launches: float = 0


_Blocks = dict[Sync | Wire | None, list[_Block]]
"""Blocks of every engine, of a raw all-reduce by wire dtype, and of compute alone (key None)."""


def bench_sync(
    profile: Profile,
    engines: Sequence[Sync],
    lab: Lab,
    scale: int,
    rounds: int,
    steps: int,
    traces: Path | None = None,
) -> list[EngineTime]:
    """Replay ``profile`` with every engine and time its steps.

    DDP is also run for each wire dtype in use, with torch's defaults if it is not in ``engines``.

    Args:
        profile: The layer profile to replay.
        engines: The engines to measure.
        lab: The ranks.
        scale: Divisor of the gradients' elements.
        rounds: Number of rounds.
        steps: Timed steps in each block.
        traces: Directory into which rank 0 writes a timeline of every engine; None means no timelines.

    Returns:
        One result per engine, first those in ``engines``, then the added DDP runs.

    Raises:
        UserError: The network cannot be made, or memory does not suffice for so many ranks.
    """
    asked = {settings.wire: settings for settings in engines if not settings.ours}
    peers: dict[Wire, Sync] = {}
    for wire in (settings.wire for settings in engines):
        cast: Cast = "bf16" if wire == "int8" else wire  # DDP sends no codes
        peers[wire] = asked.get(cast, DdpSync(wire=cast))
    chosen = list(dict.fromkeys([*engines, *peers.values()]))
    wires = list(dict.fromkeys(settings.wire for settings in chosen))
    small = profile.downscaled(scale)
    lab.check_memory(
        4 * small.elements * (2 + len(chosen)),  # the replay's, each engine's pool, the predictor's pool
        f"{lab.ranks} ranks are as many processes, which", "free some, or ask for fewer ranks or smaller gradients",
    )  # fmt: skip
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
    measured: list[tuple[_Blocks, dict[Sync, float]]] = lab.run(_measure, small, chosen, wires, rounds, steps, traces)
    by_rank = [blocks for blocks, _ in measured]
    predicted = measured[0][1]
    seconds = {
        key: [max(of_rank[key][turn].step_s for of_rank in by_rank) for turn in range(rounds)] for key in by_rank[0]
    }
    compute = median(seconds[None])
    timing = small.scaled_to(compute).timing

    def row(settings: Sync) -> EngineTime:
        times, wire = seconds[settings], settings.wire
        raw = min(seconds[wire])  # the fastest, so that noise does not raise the limit
        limit = step_lower_bound(timing, small.all_reduce_seconds(raw, settings.values_sent), settings.awaits)

        def over_ranks(field: str) -> float:
            return median(
                fmean(getattr(of_rank[settings][turn], field) for of_rank in by_rank) for turn in range(rounds)
            )

        return EngineTime(
            lab.hosts, lab.ranks_per_host, lab.rate, settings.kind, wire, scale, profile.model,
            median(times), min(times), max(times), compute, median(times) - compute, raw, limit,
            round(over_ranks("sent_bytes") * lab.ranks_per_host),
            round(over_ranks("kernel_bytes")) if lab.rate is not None else None, over_ranks("launches"),
            median(seconds[peers.get(wire, settings)]) / median(times), median(times) / limit,
            predicted[settings],
        )  # fmt: skip

    return [row(settings) for settings in chosen]


def _measure(
    profile: Profile, engines: Sequence[Sync], wires: list[Wire], rounds: int, steps: int, traces: Path | None
) -> tuple[_Blocks, dict[Sync, float]]:
    """Return this rank's blocks, and the cost model's prediction for every engine; every rank calls it."""
    report_progress("measuring the network", 0, len(engines))
    gradients = gradients_of(profile)
    topology = Topology(torch.device("cpu"))
    predicted = _predictions(profile, gradients, engines, topology)
    measurements: dict[Sync | Wire | None, Callable[[], _Block]] = {
        None: partial(_compute_block, profile, gradients, steps)
    }
    for wire in wires:
        measurements[wire] = partial(
            _raw_block, profile.elements * wire_dtype(wire).itemsize, wire_dtype(wire), topology
        )
    for number, settings in enumerate(engines):
        report_progress(f"first steps of {settings.kind}", number, len(engines))
        loop = _Loop(profile, gradients, settings, topology)
        if chosen := [prediction.step_s for prediction in loop.learn() if prediction.chosen]:
            predicted[settings] = chosen[0]
        measurements[settings] = partial(loop.block, steps)
        if traces is not None:
            loop.trace(traces / f"{settings.kind}-{settings.wire}.json")
    freeze_gc()

    def measure(key: Sync | Wire | None) -> _Block:
        dist.barrier()
        return measurements[key]()

    return in_turns(list(measurements), rounds, measure, report_progress), predicted


def _predictions(
    profile: Profile, gradients: Gradients, engines: Sequence[Sync], topology: Topology
) -> dict[Sync, float]:
    """Predict the step time of each engine in seconds, by the cost model.

    Engines that choose another engine are left out: their prediction is known only after the choice.
    """
    model = replay(profile, gradients)
    buffer = GradientBuffer(slots_of(dict(model.named_parameters()), model), topology, model)
    timing = with_moves(profile.timing, gradients, buffer)
    predicted, networks = dict[Sync, float](), dict[torch.dtype, NetworkProbe]()
    for settings in engines:
        if settings.chooses:
            continue
        engine = declare(settings)  # type: ignore[arg-type]
        wire = wire_for(buffer.values.dtype, wire_dtype(engine.wire), topology)
        network = networks.setdefault(wire, NetworkProbe(topology, wire))
        _, predicted[settings] = step_model(engine, buffer, network, settings.share).best(timing)
    return predicted


def _compute_block(profile: Profile, gradients: Gradients, steps: int) -> _Block:
    """Time steps without any synchronisation."""
    model, x = replay(profile, gradients), torch.zeros(1, requires_grad=True)
    begun = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).backward()
    return _Block((time.perf_counter() - begun) / steps)


def _raw_block(size: int, wire: torch.dtype, topology: Topology) -> _Block:
    """Time an all-reduce of ``size`` bytes with no other work: the fastest of three."""
    wire = PLAIN if is_coded(wire) else wire  # no backend can sum codes
    message = torch.zeros(topology.padded(size // wire.itemsize), dtype=wire)
    once = averaging("native" if topology.layout.row == 1 else "hierarchical", message, topology)
    return _Block(min(time_repetitions(once, 1, warm_up=False).latency_s for _ in range(3)))


class _Loop:
    """A training loop of one engine over replayed layers; its update costs nothing."""

    def __init__(self, profile: Profile, gradients: Gradients, settings: Sync, topology: Topology) -> None:
        self._model = replay(profile, gradients)
        self._forward, self._sync = attach(self._model, settings, topology=topology)
        self._x = torch.zeros(1, requires_grad=True)

    def learn(self) -> tuple[Prediction, ...]:
        """Run steps until the engine has its plan, or DDP has its buckets.

        Returns:
            The predictions that the engine decided by; empty if it decided nothing.
        """
        stats = [self._step() for _ in range(_LEARNING_STEPS)]
        self._sync.settle()
        return next((s.decision for s in stats if s.decision), ())

    def trace(self, path: Path) -> None:
        """Run a warm-up step and three more, of which rank 0 writes a timeline."""
        trace = Trace(self._model, torch.device("cpu"), path, range(1, 4)) if dist.get_rank() == 0 else None
        for _ in range(4):
            stats = self._step()
            if trace is not None:
                trace.end_step(stats)
        self._sync.settle()

    def block(self, steps: int) -> _Block:
        """Run a warm-up step and ``steps`` timed steps; bytes and launches are means over all of them."""
        before = bytes_on_link()
        dist.barrier()  # the node's ranks share the counter: none sends before all have read it
        stats = [self._step()]
        begun = time.perf_counter()
        stats += [self._step() for _ in range(steps)]
        seconds = time.perf_counter() - begun
        self._sync.settle()
        dist.barrier()
        return _Block(
            seconds / steps,
            fmean(s.sent_bytes for s in stats),
            (bytes_on_link() - before) / len(stats),
            fmean(s.launches for s in stats),
        )

    def _step(self) -> SyncStats:
        self._sync.zero_grad()
        self._forward(self._x).backward()
        stats = self._sync.end_backward()
        self._sync.update(lambda *_: None)
        return stats
