"""How near each engine comes to what the wire and the compute allow, on a network of one's own.

A layer profile is replayed against every engine in turn, several rounds of it, so that all meet the same noise. A
block is a step to get going, the measured steps, and a settling that is not timed; in between, what one step leaves
to the next forward is counted there.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, get_args

import psutil
import torch
import torch.distributed as dist

from imagenet_fast.bench.hosts import run_on
from imagenet_fast.bench.netns import parse_rate, sent_bytes, shaped_network
from imagenet_fast.bench.replay import Gradients, gradients_of, replay, timing_of, with_moves
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.lower_bound import step_lower_bound
from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.distributed.garbage import freeze_gc
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.sync_config import Awaits, Cast, DdpSync, Sync, Wire
from imagenet_fast.sync import Engine, GradientPool, SyncStats, attach, declare, wire_dtype
from imagenet_fast.sync.collectives import CommOp, all_reduce, carry, piece_elements, wire_for
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.quantization import PLAIN, is_coded
from imagenet_fast.sync.step_prediction import predict_best
from imagenet_fast.sync.topology import Topology
from imagenet_fast.sync.trace import Trace

ENGINES = "ddp:fp32,ddp,allreduce,ring,lazy,hybrid,dear,sparse,auto"

_LEARNING_STEPS = 7  # the first teaches the order, five are watched, and one is taken by the plan
_RANK_BYTES = 10 * 2**20  # of a forked rank's own before it does anything, as measured with torch 2.15


@dataclass(frozen=True)
class EngineTime:
    """One engine's steps: medians over the rounds, seconds a step, bytes a step of one host (their mean)."""

    engine: str
    wire: Wire
    hosts: int
    ranks_per_host: int
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
    """One all-reduce of as many elements of the wire dtype, with nothing else going on, the fastest of all rounds: the
    backend's own, or ours by levels where hosts have several ranks, since the backend knows no hosts."""
    limit_s: float
    """The least such an engine could take, whatever it sends when (:mod:`imagenet_fast.cost_model.lower_bound`)."""
    sent_bytes: int
    """By the engine's own count, of all the host's ranks: what they send each other is among it."""
    kernel_bytes: int | None
    """By the counter of the host's link, which does not see that; None on the loopback interface, which all share."""
    launches: float
    """Collectives that a rank starts."""
    ratio_to_ddp: float
    """How many times faster than DDP with the same wire dtype, or with bf16 where that is one of codes."""
    ratio_to_limit: float
    """How many times the limit it takes."""
    predicted_s: float
    """What the cost model makes of it, from the profile's times and the network as it was measured before."""


@dataclass(frozen=True)
class _Block:
    """Means over the steps of one block, on one rank."""

    step_s: float
    sent_bytes: float = 0
    kernel_bytes: float = 0
    """Of its host."""
    launches: float = 0


@dataclass(frozen=True)
class Declared:
    """An engine that no recipe names, under a name of its own; made of module-level functions, so that every rank finds
    it. It says of itself what the settings of the others do."""

    kind: str
    engine: Engine
    ours: ClassVar[bool] = True
    chooses: ClassVar[bool] = False
    share: ClassVar[float] = 1.0

    def travelling(self, shape: Sequence[int]) -> float:
        return float(math.prod(shape))

    @property
    def wire(self) -> Wire:
        names: tuple[Wire, ...] = get_args(Wire)
        return next(wire for wire in names if wire_dtype(wire) == self.engine.wire)

    @property
    def awaits(self) -> Awaits:
        return self.engine.awaits

    @property
    def learns(self) -> bool:
        return self.engine.learns


_Blocks = dict[Sync | Declared | Wire | None, list[_Block]]
"""Of every engine, of a raw all-reduce by wire dtype, and of compute alone (None)."""


Measured = Sync | tuple[str, Engine]
"""What is measured: an engine that recipes name, or one of one's own with the name of its row."""

Measure = Callable[[Profile, Sequence[Measured]], list[EngineTime]]
""":func:`bench_sync` on a network that has been chosen."""


def bench_sync(
    profile: Profile,
    engines: Sequence[Measured],
    hosts: int,
    ranks_per_host: int,
    rate: str | None,
    scale: int,
    rounds: int,
    steps: int,
    traces: Path | None = None,
) -> list[EngineTime]:
    """Replay ``profile``, with a ``scale``-th of its gradients, on the ranks of ``hosts`` linked at ``rate``.

    Without a rate this machine is the only host, of all ranks. DDP is run with each wire dtype there is, with torch's
    defaults where it was not asked for. Rank 0 writes a timeline of every engine into the directory ``traces``. Raises
    UserError where the network cannot be made, or memory will not do for so many ranks.
    """
    chosen = [Declared(*engine) if isinstance(engine, tuple) else engine for engine in engines]
    asked = {settings.wire: settings for settings in chosen if not settings.ours}
    peers: dict[Wire, Sync | Declared] = {
        wire: asked.get(cast, DdpSync(wire=cast))
        for wire, cast in ((settings.wire, _cast_for(settings.wire)) for settings in chosen)
    }
    chosen += [peer for peer in dict.fromkeys(peers.values()) if peer not in chosen]
    wires = list(dict.fromkeys(settings.wire for settings in chosen))
    small = profile.shrunk(scale)
    _check_memory(small, len(chosen), hosts, ranks_per_host)
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
    ranks_each = hosts * ranks_per_host if rate is None else ranks_per_host
    with shaped_network(hosts, parse_rate(rate)) if rate is not None else nullcontext() as network:
        measured: list[tuple[_Blocks, dict[Sync | Declared, float]]] = run_on(
            network, ranks_each, _measure, small, chosen, wires, rate is not None, rounds, steps, traces
        )
    by_rank = [blocks for blocks, _ in measured]
    predicted = measured[0][1]
    seconds = {
        key: [max(of_rank[key][turn].step_s for of_rank in by_rank) for turn in range(rounds)] for key in by_rank[0]
    }
    compute = median(seconds[None])
    timing = small.lasting(compute).timing

    def row(settings: Sync | Declared) -> EngineTime:
        times, wire = seconds[settings], settings.wire
        raw = min(seconds[wire])  # the limit should not be the one that meets with the noise
        limit = step_lower_bound(timing, small.sending(raw, settings.travelling), settings.awaits)

        def over_ranks(field: str) -> float:
            return median(
                fmean(getattr(of_rank[settings][turn], field) for of_rank in by_rank) for turn in range(rounds)
            )

        return EngineTime(
            settings.kind, wire, hosts, ranks_per_host, rate, scale, profile.model,
            median(times), min(times), max(times), compute, median(times) - compute, raw, limit,
            round(over_ranks("sent_bytes") * ranks_per_host),
            round(over_ranks("kernel_bytes")) if rate is not None else None, over_ranks("launches"),
            median(seconds[peers.get(wire, settings)]) / median(times), median(times) / limit,
            predicted[settings],
        )  # fmt: skip

    return [row(settings) for settings in chosen]


def _cast_for(wire: Wire) -> Cast:
    """What DDP sends in where ours send ``wire``."""
    return "bf16" if wire == "int8" or wire == "fp8" else wire


def _check_memory(profile: Profile, engines: int, hosts: int, ranks_per_host: int) -> None:
    """Refuse more ranks than there is memory for; what is counted of a rank is the least that it takes."""
    ranks = hosts * ranks_per_host
    gradients = 4 * profile.elements * (2 + engines)  # of the replay, in every engine's pool and the predictor's
    needed, free = ranks * (_RANK_BYTES + gradients), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--hosts {hosts} with --ranks-per-host {ranks_per_host} is {ranks} processes, which take more than "
            f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free; ask for fewer, or a larger --scale"
        )


def _measure(
    profile: Profile,
    engines: Sequence[Sync | Declared],
    wires: list[Wire],
    counted: bool,
    rounds: int,
    steps: int,
    traces: Path | None,
) -> tuple[_Blocks, dict[Sync | Declared, float]]:
    """On each rank: the blocks, and what the cost model makes of every engine."""
    gradients = gradients_of(profile)
    topology = Topology(torch.device("cpu"), lends=True)
    predicted = _predictions(profile, gradients, engines, topology)
    measurements: dict[Sync | Declared | Wire | None, Callable[[], _Block]] = {
        None: partial(_compute_block, profile, gradients, steps)
    }
    for wire in wires:
        measurements[wire] = partial(
            _raw_block, profile.elements * wire_dtype(wire).itemsize, wire_dtype(wire), topology
        )
    for settings in engines:
        loop = _Loop(profile, gradients, settings, counted, topology)
        if chosen := [prediction.step_s for prediction in loop.learn() if prediction.chosen]:
            predicted[settings] = chosen[0]
        measurements[settings] = partial(loop.block, steps)
        if traces is not None:
            loop.trace(traces / f"{settings.kind}-{settings.wire}.json")
    freeze_gc()
    blocks: _Blocks = defaultdict(list)
    for turn in range(rounds):
        order = list(measurements)
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            dist.barrier()
            blocks[key].append(measurements[key]())
    return dict(blocks), predicted


def _predictions(
    profile: Profile, gradients: Gradients, engines: Sequence[Sync | Declared], topology: Topology
) -> dict[Sync | Declared, float]:
    """Seconds of a step by the cost model; of an engine that chooses only once it has chosen."""
    model = replay(profile, gradients)
    pool = GradientPool(model, topology=topology)
    timing = with_moves(timing_of(profile, model, pool.spans), gradients, pool)
    predicted, networks = dict[Sync | Declared, float](), dict[torch.dtype, NetworkProbe]()
    for settings in engines:
        if settings.chooses:
            continue
        engine = settings.engine if isinstance(settings, Declared) else declare(settings)  # type: ignore[arg-type]
        wire = wire_for(pool.buffer.dtype, engine.wire, topology)
        network = networks.setdefault(wire, NetworkProbe(topology, wire))
        _, predicted[settings] = predict_best(engine, pool, wire, timing, network, settings.share)
    pool.close()
    return predicted


def _compute_block(profile: Profile, gradients: Gradients, steps: int) -> _Block:
    model, x = replay(profile, gradients), torch.zeros(1, requires_grad=True)
    begun = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).backward()
    return _Block((time.perf_counter() - begun) / steps)


def _raw_block(size: int, wire: torch.dtype, topology: Topology) -> _Block:
    """Of so many bytes, the fastest of three."""
    wire = PLAIN if is_coded(wire) else wire  # no backend adds codes up
    message = torch.zeros(topology.padded(size // wire.itemsize), dtype=wire)
    pieces: list[list[CommOp]] = []
    if topology.levels != topology.flat:
        size = piece_elements(wire, topology)
        pieces = [all_reduce(piece, wire, "hierarchical", topology) for piece in message.split(size)]
    seconds = []
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        if pieces:
            for transfer in [carry(phases) for phases in pieces]:
                transfer.wait()
        else:
            dist.all_reduce(message)
        seconds.append(time.perf_counter() - begun)
    return _Block(min(seconds))


class _Loop:
    """A training loop of one engine over replayed layers, with an update that costs nothing."""

    def __init__(
        self, profile: Profile, gradients: Gradients, settings: Sync | Declared, counted: bool, topology: Topology
    ) -> None:
        self._model = replay(profile, gradients)
        engine = settings.engine if isinstance(settings, Declared) else settings
        self._forward, self._sync = attach(self._model, engine, topology=topology)
        self._x = torch.zeros(1, requires_grad=True)
        self._learns = settings.learns
        self._counted = counted

    def learn(self) -> tuple[Prediction, ...]:
        """Steps until an engine that plans has its plan, and DDP its buckets."""
        stats = [self._step() for _ in range(_LEARNING_STEPS if self._learns else 2)]
        self._sync.settle()
        return next((s.decision for s in stats if s.decision), ())

    def trace(self, path: Path) -> None:
        """Three steps, of which rank 0 writes a timeline."""
        self._step()
        trace = Trace(self._model, torch.device("cpu"))
        for _ in range(3):
            trace.add_step(self._step())
        self._sync.settle()
        if dist.get_rank() == 0:
            trace.write(path)

    def block(self, steps: int) -> _Block:
        before = sent_bytes() if self._counted else 0
        dist.barrier()  # the counter is the host's: none of its ranks sends before all have read it
        stats = [self._step()]
        begun = time.perf_counter()
        stats += [self._step() for _ in range(steps)]
        seconds = time.perf_counter() - begun
        self._sync.settle()
        dist.barrier()
        return _Block(
            seconds / steps,
            fmean(s.sent_bytes for s in stats),
            (sent_bytes() - before) / len(stats) if self._counted else 0,
            fmean(s.launches for s in stats),
        )

    def _step(self) -> SyncStats:
        self._sync.zero_grad()
        self._forward(self._x).backward()
        stats = self._sync.end_backward()
        self._sync.update(lambda *_: None)
        return stats
