"""Steps replayed from CUDA graphs end with the bits of launched ones, and read nothing that is not there yet."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tests
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.sync.captured_step import CapturedStep
from imagenet_fast.training.training_step import TrainingStep, build_step, seed_step
from tests.conftest import tables
from tests.gpu_semantics.pretended_gpu import CUDA, PretendedGpu
from tests.gpu_semantics.test_stream_races import Model
from tests.ranks import run, with_ranks
from tests.sync.loops import unmeasured

FUSED = 0.002  # MiB: some of the model's tensors together
AT_ONCE: dict[str, dict[str, Any]] = {
    "allreduce": {}, "ring": {"bucket_mb": FUSED}, "lazy": {"threshold_mb": FUSED},
    "butterfly": {"kind": "lazy", "threshold_mb": FUSED, "collective": "butterfly"},
}  # fmt: skip
DEFERRED: dict[str, dict[str, Any]] = {"hybrid": {"fuse_mb": FUSED}, "dear": {"bucket_mb": FUSED}}
ENGINES = AT_ONCE | DEFERRED
SIDES = {"4": 4, "5": 5, "6": 6, "x": 4}
SCALES = {"x": float("inf")}
"""Of images whose gradients are no numbers, so that fp16 skips the step."""
EASY = "4" * 17


class Dropping(Model):
    """What draws random numbers on the GPU."""

    dropout = 0.25


class Asking(Dropping):
    """What asks the GPU for a value in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.isfinite().all())


class Drawing(Dropping):
    """What has the host draw how deep it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


@dataclass
class Ended:
    """How some steps have ended on a rank."""

    values: list[Tensor] = field(default_factory=list)
    """Weights, statistics, momentum and averages, wherever somebody looked."""
    news: list[dict[str, Any]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """By the detector."""
    sent: int = 0
    replayed: int = 0
    skipped: int = 0
    """Steps that overflowed."""


def ended(
    sync: str, graph: bool | str, sizes: str = EASY, micro_steps: int = 1, wire: str = "bf16",
    model: type[Model] = Dropping, strict: bool = False, reads: Collection[int] = (), trace: Path | None = None,
    on: Any = None, **changes: Any,
) -> Ended:  # fmt: skip
    """Train a step on images of each of ``sizes``; "e" in it evaluates and saves. Rank 0 ``reads`` after some."""
    device = CUDA if on is None else torch.device("cuda", torch.cuda.current_device())
    end, world = Ended(), tests.world(device=device, bf16=True)
    recipe = parse_recipe("test", tables(
        reference_ranks=world.size * micro_steps, global_batch=4 * world.size * micro_steps, graph=graph, ema_decay=0.9,
        sync={"kind": sync, "wire": wire} | ENGINES.get(sync, {}), **changes,
    ))  # fmt: skip
    with unmeasured(), (on or PretendedGpu)() as gpu:
        gpu.strict_capture = strict
        take_step = build_step(recipe, split_batch(recipe, world.size), gpu.move(model()), world, 4, trace)
        state = take_step.state
        for step, size in enumerate(sizes):
            if size == "e":
                _look(take_step, end)
                continue
            seed_step(7, step, world)
            drawn = torch.Generator().manual_seed(step * world.size + world.rank)
            shape = (micro_steps, 4, 3, SIDES[size], SIDES[size])
            images = torch.randn(shape, generator=drawn, device="cpu") * SCALES.get(size, 1)
            batches = [(gpu.take(x), gpu.take(torch.arange(4, device="cpu"))) for x in images]
            take_step(iter(batches), 0.1 / (1 + step))
            if world.rank == 0 and step in reads:
                state.model.head.weight.norm()  # type: ignore[union-attr, operator]
        _look(take_step, end)
        take_step.meter.report(MetricLogger(lambda: 0.0), state.step, 1, 0.1)
        end.news, end.sent = take_step.news, state.sent_bytes
        end.replayed = 0 if take_step.graphs is None else take_step.graphs.replays
        end.skipped = int(state.scale.skipped)
        state.sync.close()  # which lets go of graphs
        end.found = list(gpu.detector.found)
    return end


def _look(take_step: TrainingStep, end: Ended) -> None:
    """As an evaluation and a checkpoint do."""
    state = take_step.state
    state.settle()
    state.sync.state_dict()
    end.values += [x.cpu() for values in state.changed().values() for x in values]


def both(arguments: tuple[Any, ...], changes: dict[str, Any]) -> tuple[Ended, Ended]:
    return ended(*arguments, graph=False, **changes), ended(*arguments, graph="auto", **changes)


def same(world: int, *arguments: Any, backend: str = "gloo", **changes: Any) -> Ended:
    """Compare launched and replayed steps on each rank, and return how they ended on the first."""
    ends = run(world, both, arguments, changes, backend=backend)
    for launched, ours in ends:
        assert ours.found == launched.found == []
        assert ours.sent == launched.sent
        assert len(ours.values) == len(launched.values)
        assert all(map(torch.equal, ours.values, launched.values))
    _, end = ends[0]
    return end


SOME, MORE = ("lazy", "hybrid"), pytest.mark.ci


@pytest.mark.parametrize(
    "sync", [name if name in SOME else pytest.param(name, marks=MORE) for name in [*ENGINES, "auto"]]
)
@pytest.mark.parametrize("world", [pytest.param(1, marks=MORE), 2])
def test_a_replayed_run_ends_with_the_bits_of_a_launched_one(sync: str, world: int):
    """The order of gradients is learnt in the first step, three more are launched, one is compared."""
    end = same(world, sync)
    assert end.news == [{"replayed": True, "images": [4, 3, 4, 4]}]
    assert end.replayed > 5


LOOPS: dict[str, dict[str, Any]] = {
    "evaluated and saved": {"sizes": "444444e4444444e44e44"},
    "of two sizes": {"sizes": "4444444444666666646464"},
    "of three sizes": {"sizes": "444444444466666655555544446666"},
    "of micro-steps": {"micro_steps": 2, "sizes": "4" * 14},
    "in fp16": {"sizes": "44444444444x4x44", "precision": {"kind": "fp16"}, "wire": "fp16"},
    "by lars": {"optim": {"kind": "lars", "lr": 1.0, "weight_decay": 1e-3}},
    "with biases at their own rate": {"optim": {
        "kind": "sgd", "lr": 0.1, "weight_decay": 1e-3, "norm_bias_factor": 8, "decoupled": True, "nesterov": True
    }},
    "in codes": {"wire": "int8"},
    "clipped": {"clip_norm": 0.1},
}  # fmt: skip


CASES = [(sync, loop) for sync in ("lazy", *DEFERRED) for loop in LOOPS if loop != "clipped" or sync not in DEFERRED]


@pytest.mark.ci
@pytest.mark.parametrize(("sync", "loop"), CASES)
def test_loops_are_replayed(sync: str, loop: str):
    end = same(2, sync, **LOOPS[loop])
    assert {told["replayed"] for told in end.news} == {True}
    assert end.replayed > 1
    assert end.skipped == 2 * (loop == "in fp16")


@pytest.mark.parametrize(
    "loop", ["in fp16", *(pytest.param(loop, marks=MORE) for loop in ("of micro-steps", "by lars"))]
)
@pytest.mark.parametrize("sync", ["lazy", pytest.param("hybrid", marks=MORE)])
def test_steps_that_cannot_be_captured_stay_launched(sync: str, loop: str):
    """With the reason. Whoever asks for a value breaks the capture, in the middle of a forward."""
    launched, ours = run(1, both, (sync,), LOOPS[loop] | {"model": Asking, "strict": True})[0]
    why = "one cannot be captured (operation not permitted when stream is capturing)"
    assert ours.news == [{"replayed": False, "why": why}]
    assert ours.replayed == 0
    assert all(map(torch.equal, ours.values, launched.values))


@pytest.mark.parametrize("sync", ["lazy", pytest.param("hybrid", marks=MORE)])
@with_ranks(2)
def test_one_rank_that_cannot_capture_keeps_all_launched(sync: str) -> None:
    whole = CapturedStep.end

    def end(self: CapturedStep) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory\nand much more")
        whole(self)

    with patch.object(CapturedStep, "end", end):
        launched, ours = both((sync,), {})
    why = ("rank 1 cannot replay them", "one cannot be captured (out of memory)")[dist.get_rank()]
    assert ours.news == [{"replayed": False, "why": why}]
    assert ours.found == launched.found == []
    assert ours.sent == launched.sent
    assert all(map(torch.equal, ours.values, launched.values))


@pytest.mark.parametrize("sync", ["lazy", pytest.param("dear", marks=MORE)])
def test_a_graph_that_ends_elsewhere_is_let_go_of(sync: str):
    """Here the host draws a number, which the graph repeats. The run is as if all had been launched."""
    end = same(2, sync, model=Drawing)
    (told,) = end.news
    assert not told["replayed"]
    assert "a replayed one ends with other" in told["why"]
    assert end.replayed == 2


@pytest.mark.ci
@pytest.mark.parametrize("reads", [(7, 8), (9,), (10,), (11,), (12, 13), range(99)])
def test_one_rank_may_read_weights_between_steps(reads: Collection[int]):
    """Its update is carried out then, and that of others is not: they must not wait for it in a capture."""
    same(2, "hybrid", reads=reads)


@pytest.mark.ci
@pytest.mark.parametrize("sync", ["lazy", "dear"])
def test_steps_that_a_trace_shows_are_launched(sync: str, tmp_path: Path):
    end = same(2, sync, trace=tmp_path / "trace.json", sizes="4" * 24)
    assert 0 < end.replayed < 9
    assert (tmp_path / "trace.json").stat().st_size > 1000


@with_ranks(1)
def test_graph_true_compares_nothing() -> None:
    assert ended("lazy", True, model=Drawing).news == [{"replayed": True, "images": [4, 3, 4, 4]}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sync": "sparse"}, "sync.kind 'sparse' with sync.timing 'lazy' decides in each step what to send"),
        ({"sync": "lazy", "micro_steps": 5}, "a step has 5 micro-steps, and a graph holds 4 at most"),
    ],
)
@with_ranks(1)
def test_what_no_graph_can_hold_is_launched_and_said(changes: dict[str, Any], why: str) -> None:
    assert ended(**changes, graph="auto", sizes="444").news == [{"replayed": False, "why": why}]
