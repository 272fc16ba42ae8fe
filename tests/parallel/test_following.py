"""Whatever the layout, engine and rule of update, ranks follow one process on the joined batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.evaluation import StopRequested
from tests.conftest import tiers
from tests.parallel.small import UNDIVIDED, Loop, Trained, small_model, train
from tests.ranks import run, with_ranks
from tests.sync.loops import unmeasured

EXACT: dict[str, dict[str, Any]] = {
    "lazy": {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.001},
    "ring": {"kind": "ring", "wire": "fp32", "bucket_mb": 0.001},
    "hybrid": {"kind": "hybrid", "wire": "fp32", "fuse_mb": 0.001},
    "dear": {"kind": "dear", "wire": "fp32", "bucket_mb": 0.001},
    "allreduce": {"kind": "allreduce", "wire": "fp32"},
}
SPARSE: dict[str, Any] = {"kind": "sparse", "wire": "fp32", "chunk": 16, "ramp_epochs": 0, "dense_epochs": 0}
ENGINES: dict[str, dict[str, Any]] = EXACT | {
    "learning": {"kind": "lazy", "wire": "fp32"},  # its threshold
    "sparse": {**SPARSE, "sparsity": 0.0},
    "sparse-hybrid": {**SPARSE, "sparsity": 0.0, "timing": "hybrid"},
    "powersgd": {"kind": "powersgd", "wire": "fp32", "rank": 36, "timing": "dear"},  # of full rank
}
MORE: dict[str, dict[str, Any]] = {"auto": {"kind": "auto", "wire": "fp32"}, "ddp": {"kind": "ddp"}}
INEXACT: dict[str, dict[str, Any]] = {
    "sparse": {**SPARSE, "sparsity": 0.9},
    "sparse-hybrid": {**SPARSE, "sparsity": 0.9, "timing": "hybrid"},
    "sparse-corrected": {**SPARSE, "sparsity": 0.5, "momentum_correction": True},
    "powersgd": {"kind": "powersgd", "wire": "bf16", "rank": 2},
    "int8": {"kind": "lazy", "wire": "int8"},
    "auto": {"kind": "auto", "wire": "bf16", "inexact": True},
}
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.1, "weight_decay": 1e-3, "nesterov": True}
LARS: dict[str, Any] = {"kind": "lars", "lr": 0.1, "weight_decay": 1e-3, "trust_coefficient": 0.05}
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"optim": SGD},
    "lars": {"optim": LARS},
    "larc": {"optim": {**LARS, "clip": True, "biases": "scaled"}},
    "clipped": {"optim": SGD, "clip_norm": 0.05},
    "averaged": {"optim": SGD | {"decay_all": True, "decoupled": True}, "ema_decay": 0.7, "loss": "bce"},
}
LAYOUTS: dict[str, tuple[int, Parallel]] = {
    "tp2": (2, Parallel(tensor=2)),
    "pp2": (2, Parallel(pipeline=2, micro_batches=2)),
    "pp2-gpipe": (2, Parallel(pipeline=2, micro_batches=3, schedule="gpipe")),
    "tp3": (3, Parallel(tensor=3)),
    "pp3-gpipe": (3, Parallel(pipeline=3, schedule="gpipe")),
    "tp4": (4, Parallel(tensor=4)),
    "tp2dp2": (4, Parallel(tensor=2)),
    "pp2dp2": (4, Parallel(pipeline=2, micro_batches=2)),
    "pp4": (4, Parallel(pipeline=4, micro_batches=6)),
    "pp2tp2": (4, Parallel(tensor=2, pipeline=2, micro_batches=3)),
    "pp2dp2-interleaved": (4, Parallel(pipeline=2, micro_batches=2, schedule="interleaved")),
    "dp3": (3, UNDIVIDED),
}
"""Ranks, and how they are laid out."""
OTHERS = {
    "pp4-even": (4, Parallel(pipeline=4, micro_batches=4)),
    "pp4-interleaved": (4, Parallel(pipeline=4, micro_batches=4, schedule="interleaved")),
    "dp4": (4, UNDIVIDED),
}
"""For ResNet's batch."""
AT_FIRST = {"lazy-sgd-tp2", "hybrid-sgd-pp2-gpipe", "dear-sgd-tp3", "averaged-tp2dp2", "clipped-pp2"}
BATCH = {"tiny": 12, "alexnet": 12, "alexnet_bn": 8, "resnet18": 16}
RATE = {"sgd": 1e-5, "lars": 1e-3}  # of resnet18


def case(name: str, *values: object, later: bool = False) -> Any:
    marks = () if name in AT_FIRST else pytest.mark.weekly if later else pytest.mark.ci
    return pytest.param(*values, id=name, marks=marks)


def engines() -> Iterator[Any]:
    """Every engine in every layout, updated by turns; two thirds of those that divide a model are weekly."""
    yield case("ddp-sgd-dp3", "tiny", "sgd", "dp3", "ddp")
    for number, (layout, engine) in enumerate(product(LAYOUTS, ENGINES)):
        rule = ("sgd", "lars")[number % 2]
        yield case(f"{engine}-{rule}-{layout}", "tiny", rule, layout, engine, later=layout != "dp3" and number % 3 > 0)


def rules() -> Iterator[Any]:
    """Every other rule of update in every layout; ``auto``, which chooses after seven steps, with one of them."""
    for rule, engine in (("larc", "auto"), ("clipped", "lazy"), ("averaged", "hybrid")):
        for layout in LAYOUTS:
            yield case(f"{rule}-{layout}", "tiny", rule, layout, engine)


def models() -> Iterator[Any]:
    """Larger models have engines by turns.

    ResNet-18 learns from 96 pixels at rates at which one process follows itself by 8e-7 when its first weights change
    by 1e-7. Over the 1 x 1 maps of 32 pixels batch norm has four values a channel, and the two are 0.1 % apart.
    """
    turns = zip(cycle(("sgd", "lars")), cycle(EXACT), strict=False)
    alexnet = [("alexnet", layout) for layout, (world, _) in LAYOUTS.items() if world != 3]  # 256 units
    for kind, layout in [*alexnet, *product(["resnet18"], ["pp2dp2", *OTHERS])]:
        rule, engine = next(turns)
        later = kind == "resnet18" and layout in OTHERS
        yield case(f"{kind}-{engine}-{rule}-{layout}", kind, rule, layout, engine, later=later)


@cache
def alone(kind: str, rule: str) -> Trained:
    return follow(1, kind, rule, UNDIVIDED, "lazy")


def follow(world: int, kind: str, rule: str, layout: Parallel, engine: str) -> Trained:
    """The first of ``world`` ranks."""
    lr = {"resnet18": RATE.get(rule, 0.0), "alexnet_bn": 0.01}.get(kind, 0.1)
    micro = 4 if kind == "resnet18" else 1 if BATCH[kind] % (2 * layout.micro_batches) else 2
    settings = {"global_batch": BATCH[kind], "micro_batch": micro, "sync": (ENGINES | MORE)[engine]} | RULES[rule]
    steps = 10 if rule == "larc" else 7 if kind == "tiny" else 5
    return run(world, partial(train, kind, steps, lr, layout, **settings))[0]


@pytest.mark.parametrize(("kind", "rule", "layout", "engine"), [*engines(), *rules(), *models()])
def test_ranks_follow_one_process(kind: str, rule: str, layout: str, engine: str):
    world, parallel = (LAYOUTS | OTHERS)[layout]
    trained, expected = follow(world, kind, rule, parallel, engine), alone(kind, rule)
    assert expected.losses[4] < expected.losses[0], "it learns"
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trained.weights.keys() == expected.weights.keys()
    for name, weight in trained.weights.items():
        if not ("running" in name and kind == "resnet18"):  # statistics are averaged over ranks before an evaluation
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_clipped_step_is_another():
    assert alone("tiny", "clipped").losses != alone("tiny", "sgd").losses


@pytest.mark.ci
def test_batch_norm_has_the_statistics_of_accumulation():
    sharded = follow(4, "alexnet_bn", "sgd", Parallel(tensor=2), "lazy")
    assert sharded.losses == pytest.approx(alone("alexnet_bn", "sgd").losses, rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2dp2", "pp2dp2"])
@with_ranks(4)
@unmeasured()
def test_statistics_are_averaged_over_the_ranks_that_hold_a_layer(layout: str) -> None:
    loop = Loop("alexnet_bn", LAYOUTS[layout][1], global_batch=12, model={"kind": "alexnet_bn"})
    state, rank = loop.begin(small_model("alexnet_bn")).state, dist.get_rank()
    running = [buffer for name, buffer in state.eval_model.named_buffers() if "running" in name]
    for buffer in running:
        buffer.fill_(rank)
    mean = 1.5 if layout == "tp2dp2" else rank // 2 * 2 + 0.5
    with suppress(StopRequested), state.averaged_statistics():
        assert all((buffer == mean).all() for buffer in running)
        raise StopRequested
    assert all((buffer == rank).all() for buffer in running), "of an evaluation that was cut off, nothing is left"
    with state.averaged_statistics():
        assert running
    assert all((buffer == mean).all() for buffer in running)
    state.sync.close()


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("engine", tiers(["sparse"], INEXACT))
def test_engines_with_a_residual_keep_ranks_alike(engine: str, layout: str):
    """A rank may have nothing to update where another, which asks it for norms, has."""
    optim = SGD | {"nesterov": False} if "corrected" in engine else LARS
    settings = {"global_batch": 12, "sync": INEXACT[engine], "optim": optim}
    for trained in run(2, partial(train, "tiny", 8, parallel=LAYOUTS[layout][1], **settings)):
        assert all(math.isfinite(loss) for loss in trained.losses)
