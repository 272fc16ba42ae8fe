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
from statistics import fmean, median, mode
from typing import Any, ClassVar, Protocol, get_args

import psutil
import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from imagenet_fast.bench.hosts import run_on
from imagenet_fast.bench.network import parse_rate, sent_bytes, shaped_network
from imagenet_fast.bench.replay import Gradients, gradients_of, replay, timing_of
from imagenet_fast.cost.limit import least_step_s
from imagenet_fast.cost.profile import Profile
from imagenet_fast.cost.simulation import Prediction
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.engine_settings import Awaits, DdpSync, Sync, Wire
from imagenet_fast.record.tables import compact_table
from imagenet_fast.sync import Engine, GradientPool, SyncStats, attach, declare, wire_dtype
from imagenet_fast.sync.collectives import Phase, all_reduce, carry, piece_elements, wire_for
from imagenet_fast.sync.prediction import best_fuse, predict
from imagenet_fast.sync.probing import Network
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
    """One all-reduce of as many elements of the wire dtype, with nothing else going on: the backend's own, or ours by
    levels where hosts have several ranks, since the backend knows no hosts."""
    limit_s: float
    """The least such an engine could take, whatever it sends when (:mod:`imagenet_fast.cost.limit`)."""
    sent_bytes: int
    """By the engine's own count, of all the host's ranks: what they send each other is among it."""
    kernel_bytes: int | None
    """By the counter of the host's link, which does not see that; None on the loopback interface, which all share."""
    launches: float
    """Collectives that a rank starts."""
    ratio_to_ddp: float
    """How many times faster than DDP with the same wire dtype."""
    ratio_to_limit: float
    """How many times the limit it takes."""
    predicted_s: float
    """What the cost model makes of it, from the profile's times and the network as it was measured before."""


class Overlap(Protocol):
    """What bounds an engine: see :class:`~imagenet_fast.recipe.engine_settings.EngineTable`."""

    @property
    def awaits(self) -> Awaits: ...
    def travelling(self, shape: Sequence[int]) -> float: ...


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


def bench_sync(
    profile: Profile,
    engines: Sequence[Sync | tuple[str, Engine]],
    hosts: int,
    ranks_per_host: int,
    rate: str | None,
    scale: int,
    rounds: int,
    steps: int,
    traces: Path | None = None,
) -> list[EngineTime]:
    """Replay ``profile``, with a ``scale``-th of its gradients, on the ranks of ``hosts`` linked at ``rate``.

    An engine of one's own comes with the name of its row. Without a rate this machine is the only host, of all ranks.
    DDP is run with each wire dtype there is, with torch's defaults where it was not asked for. Rank 0 writes a timeline
    of every engine into the directory ``traces``. Raises UserError where the network cannot be made, or memory will not
    do for so many ranks.
    """
    chosen = [Declared(*engine) if isinstance(engine, tuple) else engine for engine in engines]
    wires = list(dict.fromkeys(settings.wire for settings in chosen))
    asked = {settings.wire: settings for settings in chosen if not settings.ours}
    peers = {wire: asked.get(wire, DdpSync(wire=wire)) for wire in wires}
    chosen += [peer for peer in peers.values() if peer not in chosen]
    small = profile.shrunk(scale)
    _check_memory(small, len(chosen), hosts, ranks_per_host)
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
    ddp_s = {wire: median(seconds[peer]) for wire, peer in peers.items()}

    def row(settings: Sync | Declared) -> EngineTime:
        times, wire = seconds[settings], settings.wire
        raw = median(seconds[wire])
        limit = limit_s(settings, small, compute, raw)

        def over_ranks(field: str) -> float:
            return median(
                fmean(getattr(of_rank[settings][turn], field) for of_rank in by_rank) for turn in range(rounds)
            )

        return EngineTime(
            settings.kind, wire, hosts, ranks_per_host, rate, scale, profile.model,
            median(times), min(times), max(times), compute, median(times) - compute, raw, limit,
            round(over_ranks("sent_bytes") * ranks_per_host),
            round(over_ranks("kernel_bytes")) if rate is not None else None, over_ranks("launches"),
            ddp_s[wire] / median(times), median(times) / limit,
            predicted[settings],
        )  # fmt: skip

    return [row(settings) for settings in chosen]


def limit_s(settings: Overlap, profile: Profile, compute_s: float, raw_s: float) -> float:
    """The least that a step of ``compute_s`` can take, all that an engine of this kind may overlap being overlapped.

    ``raw_s`` is one undisturbed all-reduce of all gradients.
    """
    s_per_element = raw_s / profile.elements
    travelling = [sum(map(settings.travelling, layer.shapes)) for layer in reversed(profile.layers)]
    seconds = [elements * s_per_element for elements in travelling]
    return least_step_s(profile.lasting(compute_s).timing, seconds, settings.awaits)


def _check_memory(profile: Profile, engines: int, hosts: int, ranks_per_host: int) -> None:
    """Refuse more ranks than there is memory for; what is counted of a rank is the least that it takes."""
    ranks = hosts * ranks_per_host
    gradients = (
        4 * profile.elements * (2 + engines)
    )  # of the replayed layers, in every engine's pool and the predictor's
    needed, free = ranks * (_RANK_BYTES + gradients), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--hosts {hosts} with --ranks-per-host {ranks_per_host} is {ranks} processes, which take more than "
            f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free; ask for fewer, or a larger --scale"
        )


def sync_table(times: list[EngineTime]) -> Table:
    """One row an engine."""
    main = next(t for t in times if t.wire == mode(other.wire for other in times))
    table = compact_table(
        ("engine",),
        ("s a step", "spread", "MB", "kernel", "x DDP", "x limit", "predicted"),
        (
            (
                t.engine if t.wire == main.wire else f"{t.engine} {t.wire}", f"{t.step_s:.3f}",
                f"±{(t.step_s_max - t.step_s_min) / 2:.3f}", f"{t.sent_bytes / 1e6:.1f}",
                "-" if t.kernel_bytes is None else f"{t.kernel_bytes / 1e6:.1f}", f"{t.ratio_to_ddp:.2f}",
                f"{t.ratio_to_limit:.3f}", f"{t.predicted_s:.3f}",
            )
            for t in times
        ),
    )  # fmt: skip
    link = "loopback" if main.rate is None else main.rate
    scale = f"1/{main.scale} of {main.model}" if main.scale > 1 else main.model
    hosts = f"{main.hosts} host{'s' if main.hosts > 1 else ''}"
    if main.ranks_per_host > 1:
        hosts += f" of {main.ranks_per_host} ranks"
    table.title = (
        f"{scale}, {hosts}, {link}, {main.wire}: compute {main.compute_s:.3f} s, raw all-reduce {main.raw_s:.3f} s"
    )
    return table


def draw_bars(times: list[EngineTime], figure: Any) -> None:
    """A bar an engine: compute, what is exposed beyond it, and a mark at the limit."""
    axes = figure.subplots()
    common = mode(t.wire for t in times)
    names = [t.engine if t.wire == common else f"{t.engine}, {t.wire}" for t in times]
    axes.barh(names, [t.compute_s for t in times], color="#4c72b0", label="compute")
    exposed = [max(0.0, t.exposed_s) for t in times]
    axes.barh(names, exposed, left=[t.compute_s for t in times], color="#dd8452", label="exposed communication")
    for row, t in enumerate(times):
        axes.plot([t.limit_s] * 2, [row - 0.4, row + 0.4], color="black", label=None if row else "limit of its kind")
        beyond = (max(t.step_s, t.limit_s), row)
        axes.annotate(f"{t.step_s:.2f} s", beyond, xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="seconds a step")
    axes.set_title(sync_table(times).title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


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
    predicted = _predictions(replay(profile, gradients), profile, engines)
    measurements: dict[Sync | Declared | Wire | None, Callable[[], _Block]] = {
        None: partial(_compute_block, profile, gradients, steps)
    }
    for wire in wires:
        measurements[wire] = partial(_raw_block, profile.elements, wire_dtype(wire))
    for settings in engines:
        loop = _Loop(profile, gradients, settings, counted)
        if chosen := [prediction.step_s for prediction in loop.learn() if prediction.chosen]:
            predicted[settings] = chosen[0]
        measurements[settings] = partial(loop.block, steps)
        if traces is not None:
            loop.trace(traces / f"{settings.kind}-{settings.wire}.json")
    blocks: _Blocks = defaultdict(list)
    for turn in range(rounds):
        order = list(measurements)
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            dist.barrier()
            blocks[key].append(measurements[key]())
    return dict(blocks), predicted


def _predictions(
    model: nn.Sequential, profile: Profile, engines: Sequence[Sync | Declared]
) -> dict[Sync | Declared, float]:
    """Seconds of a step by the cost model; of an engine that chooses only once it has chosen."""
    pool = GradientPool(model)
    timing = timing_of(profile, model, pool.spans)
    predicted, networks = dict[Sync | Declared, float](), dict[torch.dtype, Network]()
    topology = pool.topology.anew()
    for settings in engines:
        if settings.chooses:
            continue
        engine = settings.engine if isinstance(settings, Declared) else declare(settings)  # type: ignore[arg-type]
        wire = wire_for(pool.buffer.dtype, engine.wire, topology)
        network = networks.setdefault(wire, Network(topology, wire))
        fuse = best_fuse(engine, pool, wire, timing, network)
        predicted[settings] = predict(engine, pool, wire, fuse, timing, network, settings.share)
    topology.close()
    pool.close()
    return predicted


def _compute_block(profile: Profile, gradients: Gradients, steps: int) -> _Block:
    model, x = replay(profile, gradients), torch.zeros(1, requires_grad=True)
    begun = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).backward()
    return _Block((time.perf_counter() - begun) / steps)


def _raw_block(elements: int, wire: torch.dtype) -> _Block:
    """The fastest of three: the limit should not be the one that meets with the noise."""
    topology = Topology(torch.device("cpu"))
    message = torch.zeros(topology.padded(elements), dtype=wire)
    pieces: list[list[Phase]] = []
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
    topology.close()
    return _Block(min(seconds))


class _Loop:
    """A training loop of one engine over replayed layers, with an update that costs nothing."""

    def __init__(self, profile: Profile, gradients: Gradients, settings: Sync | Declared, counted: bool) -> None:
        self._model = replay(profile, gradients)
        self._forward, self._sync = attach(self._model, settings.engine if isinstance(settings, Declared) else settings)
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
        stats = self._sync.finish()
        self._sync.update(lambda *_: None)
        return stats
