"""Published and measured rows beside the model: none tuned to fit, none hidden. See ``clusters/published.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from statistics import fmean

from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.cost_model.layer_profile import load_profile
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.devices import Pace
from imagenet_fast.plan.network import StatedNetwork
from imagenet_fast.plan.prediction import label, planned_engines, predict_step
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import parse_engines, read_toml, shipped, validated
from imagenet_fast.recipe.sync_config import AllReduceSync, Sync

TCP_PAYLOAD = 1448 / 1514
"""Share of a frame that TCP leaves for data."""
GLOO_PAIR_S = 0.25e-3
"""Seconds of gloo's latency between shaped hosts for each rank and peer of it: 3 ms with four ranks.

All ranks share two cores, and each sends to each other in both halves of an all-reduce. So what the cores do for an
all-reduce, however short, grows with the number of ranks times the number of their peers.
"""
LARGE_MISS = 0.10
"""Error from which a row has a sentence of what it leaves unexplained."""


@dataclass(frozen=True)
class Compared(Row):
    """A published or measured step beside its prediction."""

    name: str = field(metadata=column("row"))
    """Who, or what was measured."""
    gpus: int = field(metadata=column("GPUs"))
    """GPUs, or ranks."""
    batch: int | None = field(metadata=column("batch"))
    """Images of one GPU in a step."""
    engine: str = field(metadata=column("engine"))
    """Engine and wire dtype that stand for theirs."""
    reported: float = field(metadata=column("reported", "ms", ".2f"))
    """Seconds of a step, as reported or measured."""
    predicted: float = field(metadata=column("predicted", "ms", ".2f"))
    """Seconds of a step by the model."""
    error: float = field(metadata=column("error", form="+.1%"))
    """``predicted`` over ``reported``, less 1."""
    calibrated_on: str = field(metadata=column("calibrated on"))
    """``itself`` where the compute was fitted to this row; ``circular`` where it follows from the paper's own
    speed-up, so that the row cannot test the model; ``nothing`` for a nominal link; else ``held out``."""
    ours: str | None = field(metadata=column("ours"))
    """The fastest exact engine of ours at their batch, and its wire dtype; None: the row is of an engine here."""
    ours_s: float | None = field(metadata=column("ours", "ms", ".2f"))
    """Seconds of a step with it."""
    left: str
    """The part that the model leaves unexplained, where it misses by over 10 %."""


class Published(Table):
    """A published result; ``clusters/published.toml`` says what its fields are."""

    name: str
    cluster: str
    gpus: int
    batch: int
    step_ms: float
    engine: Sync = AllReduceSync(wire="bf16", fused=True)
    compute: tuple[float, float] | None = None
    model: str = "resnet50"
    calibrated_on: str = "held out"
    pace: Pace = "published"
    gbit: float | None = None
    minutes: float | None = None
    left: str = ""

    def compute_s(self) -> float:
        """Return the seconds of a step that a GPU computes alone."""
        own = dict(zip(("c0", "c1"), self.compute or (), strict=False))
        return load_cluster(self.cluster, self.pace).gpu.compute(self.model).model_copy(update=own).seconds(self.batch)

    def compared(self) -> Compared:
        """Predict it on its cluster, and the fastest exact engine of ours there."""
        cluster = load_cluster(self.cluster, self.pace)
        network = (cluster if self.gbit is None else cluster.with_nics(self.gbit)).network(self.gpus)
        layers = cluster.gpu.layers(self.model).scaled_to(self.compute_s() * cluster.slowest(self.gpus))
        engines = [self.engine, *planned_engines("ring,lazy,hybrid,dear")]
        predicted, *others = (predict_step(engine, layers, network).step_s for engine in engines)
        ours_s, best = min(zip(others, engines[1:], strict=True), key=itemgetter(0))
        reported = self.step_ms / 1e3
        error = predicted / reported - 1
        return Compared(
            self.name, self.gpus, self.batch, f"{label(self.engine)} {self.engine.wire}", reported, predicted, error,
            self.calibrated_on, f"{best.kind} {best.wire}", ours_s, self.left if abs(error) > LARGE_MISS else "",
        )  # fmt: skip


class Shaped(Table):
    """Steps that `bench sync` measured between hosts in network namespaces."""

    profile: str
    scale: int
    hosts: int
    mbit: float
    compute_s: float
    """Measured seconds of a step without synchronisation."""
    seconds: dict[str, float]
    """Measured seconds of a step by engine, as in `--sync`."""
    ranks_per_host: int = 1

    def compared(self) -> Iterator[Compared]:
        """Predict every step that was measured, by the nominal rate of the hosts' links."""
        name = f"{self.profile}/{self.scale}, {self.hosts} x {self.mbit:g} Mbit/s, {self.compute_s:g} s"
        layers = load_profile(self.profile).downscaled(self.scale).scaled_to(self.compute_s)
        layout = RankLayout((self.ranks_per_host,) * self.hosts, on_gpu=False)
        latency_s = GLOO_PAIR_S * layout.size * (layout.size - 1)
        network = StatedNetwork(layout, TCP_PAYLOAD * self.mbit * 1e6 / 8, between_s=latency_s)
        engines = parse_engines(",".join(self.seconds), "bf16")
        for engine, measured in zip(engines, self.seconds.values(), strict=True):
            predicted = predict_step(engine, layers, network).step_s
            yield Compared(
                name, layout.size, None, f"{engine.kind} {engine.wire}", measured, predicted, predicted / measured - 1,
                "nothing", None, None, "",
            )  # fmt: skip


class Results(Table):
    """What ``clusters/published.toml`` holds."""

    published: tuple[Published, ...]
    shaped: tuple[Shaped, ...]


@cache
def known_results() -> Results:
    """Return the published and the measured results."""
    path = shipped("cluster")["dgx-h100"].with_name("published.toml")
    return validated(Results, path.name, read_toml(path))


@cache
def all_rows() -> list[Compared]:
    """Return the published rows, then the measured ones."""
    found = known_results()
    return [*(row.compared() for row in found.published), *(row for steps in found.shaped for row in steps.compared())]


def summary(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield mean and worst error of the measured rows, and of MLPerf's systems by size, those held out apart."""
    out = [row for row in rows if row.calibrated_on == "held out"]
    held_out = [row for row in out if row.name.startswith("MLPerf")]
    large = [row for row in held_out if row.gpus >= 512]
    for name, some in (
        ("measured between shaped hosts, nothing fitted", [row for row in rows if row.calibrated_on == "nothing"]),
        ("MLPerf systems of 512 GPUs and more, held out", large),
        ("of these, without v0.5", [row for row in large if not row.name.startswith("MLPerf v0.5")]),
        ("MLPerf systems of 1 to 64 GPUs, held out", [row for row in held_out if row.gpus <= 64]),
        ("this program on one GPU, held out", [row for row in out if row.name.startswith("ours")]),
    ):
        errors = [abs(row.error) for row in some]
        yield f"{name}: {len(errors)} rows, mean error {fmean(errors):.1%}, worst {max(errors):.1%}"
