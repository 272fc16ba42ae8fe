"""Whatever the layout, engine and rule of update, ranks follow one process on the joined batch."""

from __future__ import annotations

import math
from itertools import cycle, product
from typing import Any

import pytest
import torch

from imagenet_fast.recipe.parallel_config import Parallel
from tests.parallel.small import Trained, train
from tests.ranks import run

EXACT: tuple[dict[str, Any], ...] = (
    {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.001},
    {"kind": "ring", "wire": "fp32", "bucket_mb": 0.001},
    {"kind": "hybrid", "wire": "fp32", "fuse_mb": 0.001},
    {"kind": "dear", "wire": "fp32", "bucket_mb": 0.001},
    {"kind": "allreduce", "wire": "fp32"},
)
SPARSE: dict[str, Any] = {"kind": "sparse", "wire": "fp32", "chunk": 16, "ramp_epochs": 0, "dense_epochs": 0}
OTHERS: tuple[dict[str, Any], ...] = (
    {"kind": "lazy", "wire": "fp32"},  # it learns its threshold
    {**SPARSE, "sparsity": 0.0},
    {**SPARSE, "sparsity": 0.0, "timing": "hybrid"},
    {"kind": "powersgd", "wire": "fp32", "rank": 36, "timing": "dear"},  # of full rank
)
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.1, "weight_decay": 1e-3, "nesterov": True}
LARS: dict[str, Any] = {"kind": "lars", "lr": 0.1, "weight_decay": 1e-3, "trust_coefficient": 0.05}
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"optim": SGD},
    "lars": {"optim": LARS},
    "larc": {"optim": {**LARS, "clip": True, "biases": "scaled"}},
    "clipped": {"optim": SGD, "clip_norm": 0.05},
    "averaged": {"optim": LARS, "ema_decay": 0.7},
}
BATCH = {"tiny": 12, "alexnet": 12, "alexnet_bn": 8, "resnet18": 16}
RATE = {"tiny": 0.1, "alexnet": 0.1, "alexnet_bn": 0.01}
RESNET_RATE = {"sgd": 1e-5, "lars": 1e-3}
Case = tuple[str, str, Parallel, dict[str, Any]]
"""The model, the rule by which it is updated, the layout, the engine."""

PIPED = Parallel(pipeline=2, micro_batches=2)
LAYOUTS: dict[int, tuple[Parallel, ...]] = {
    2: (Parallel(tensor=2), PIPED, Parallel(pipeline=2, micro_batches=3, schedule="gpipe")),
    3: (Parallel(tensor=3), Parallel(pipeline=3, schedule="gpipe")),
    4: (
        Parallel(tensor=4), Parallel(tensor=2), PIPED, Parallel(pipeline=4, micro_batches=6),
        Parallel(tensor=2, pipeline=2, micro_batches=3),
    ),
}  # fmt: skip
"""By the number of ranks; what a layout leaves of them is data-parallel."""


def cases_of(world: int) -> list[Case]:
    """Every engine and every rule in each number of ranks; AlexNet by few engines."""
    layouts, updates = cycle(LAYOUTS[world]), cycle(("lars", "sgd"))
    cases: list[Case] = [("tiny", next(updates), next(layouts), engine) for engine in EXACT]
    cases += [("tiny", rule, next(layouts), EXACT[2 if rule == "averaged" else 0]) for rule in RULES]
    match world:
        case 2:
            cases += [("tiny", "lars", Parallel(tensor=2), engine) for engine in OTHERS]
            cases += [("alexnet", "lars", Parallel(tensor=2), EXACT[2]), ("alexnet", "sgd", PIPED, EXACT[2])]
        case 4:
            cases += [("tiny", "lars", Parallel(tensor=2), EXACT[2]), ("tiny", "lars", Parallel(tensor=4), EXACT[3])]
            cases += [("alexnet", next(updates), layout, EXACT[2]) for layout in LAYOUTS[4]]
    return cases


def all_cases_of(world: int) -> list[Case]:
    """Every engine in every layout, updated by turns; larger models have engines by turns.

    ResNet-18 learns from 96 pixels at rates at which one process follows itself by 8e-7 when its first weights change
    by 1e-7. Over the 1 x 1 maps of 32 pixels batch norm has four values a channel, and the two are 0.1 % apart.
    """
    updates, engines = cycle(("sgd", "lars")), cycle(EXACT)
    resnets = (Parallel(), PIPED, Parallel(pipeline=4, micro_batches=4)) if world == 4 else ()
    tiny = [("tiny", next(updates), *case) for case in product(LAYOUTS[world], [*EXACT, *OTHERS])]
    clipped = [("tiny", "clipped", *case) for case in product(LAYOUTS[world], EXACT[:1])]
    alexnet = [("alexnet", next(updates), layout, next(engines)) for layout in LAYOUTS[world]]
    return tiny + clipped + alexnet + [("resnet18", next(updates), layout, next(engines)) for layout in resnets]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Trained]:
    return dict(run(1, _alone)[0])


def _alone() -> dict[tuple[str, str], Trained]:
    lazy = {"sync": EXACT[0]}
    expected = {("tiny", rule): train("tiny", 7, BATCH["tiny"], **lazy, **changes) for rule, changes in RULES.items()}
    assert expected["tiny", "clipped"].losses != expected["tiny", "sgd"].losses
    for rule in ("sgd", "lars"):
        expected["alexnet", rule] = train("alexnet", 5, BATCH["alexnet"], **lazy, **RULES[rule])
        expected["resnet18", rule] = train("resnet18", 5, 16, RESNET_RATE[rule], micro=4, **lazy, **RULES[rule])
    return expected | {("alexnet_bn", "sgd"): train("alexnet_bn", 5, BATCH["alexnet_bn"], 0.01, **lazy, **RULES["sgd"])}


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.ci)])
def test_every_layout_and_engine_follows_one_process(world: int, alone: dict[tuple[str, str], Trained]):
    follows(alone, world, cases_of(world))


@pytest.mark.ci
@pytest.mark.parametrize("world", [2, 4])
def test_every_engine_follows_one_process_in_every_layout(world: int, alone: dict[tuple[str, str], Trained]):
    follows(alone, world, all_cases_of(world))


def follows(alone: dict[tuple[str, str], Trained], world: int, cases: list[Case]) -> None:
    for (kind, rule, layout, engine), trained in run(world, _laid_out, cases)[0]:
        expected, what = alone[kind, rule], f"{kind}, {rule}, {layout!r} of {world}, {engine}"
        assert expected.losses[4] < expected.losses[0], f"{what} learns"
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5), what
        assert trained.weights.keys() == expected.weights.keys()
        for name, weight in trained.weights.items():
            if "running" in name and kind == "resnet18":
                continue  # statistics are averaged over ranks before an evaluation
            torch.testing.assert_close(
                weight, expected.weights[name], rtol=1e-3, atol=1e-5, msg=lambda text, at=f"{name}, {what}": at + text
            )


def _laid_out(cases: list[Case]) -> list[tuple[Case, Trained]]:
    trained = []
    for case in cases:
        kind, rule, layout, engine = case
        steps = 7 if kind == "tiny" else 5
        micro = 4 if kind == "resnet18" else 1 if BATCH[kind] % (2 * layout.micro_batches) else 2
        lr = RESNET_RATE[rule] if kind == "resnet18" else RATE[kind]
        trained.append((case, train(kind, steps, BATCH[kind], lr, layout, micro, sync=engine, **RULES[rule])))
    return trained


def test_batch_norm_has_the_statistics_of_accumulation(alone: dict[tuple[str, str], Trained]):
    losses = run(4, _batch_norm)[0]
    assert losses == pytest.approx(alone["alexnet_bn", "sgd"].losses, rel=1e-5)


def _batch_norm() -> list[float]:
    return train(
        "alexnet_bn", 5, BATCH["alexnet_bn"], 0.01, parallel=Parallel(tensor=2), sync=EXACT[0], **RULES["sgd"]
    ).losses


def test_engines_with_residual_keep_ranks_alike():
    run(2, _inexact_engines)


def _inexact_engines() -> None:
    """A rank may have nothing to update where another, which asks it for norms, has."""
    piped = Parallel(pipeline=2, micro_batches=2)
    for rule, engine in (
        ("lars", {**SPARSE, "sparsity": 0.9}),
        ("lars", {**SPARSE, "sparsity": 0.9, "timing": "hybrid"}),
        ("sgd", {**SPARSE, "sparsity": 0.5, "momentum_correction": True}),
        ("lars", {"kind": "powersgd", "wire": "bf16", "rank": 2}),
        ("lars", {"kind": "lazy", "wire": "int8", "bf16_steps": 2}),
        ("lars", {"kind": "auto", "wire": "bf16", "inexact": True}),
    ):
        optim = {key: value for key, value in RULES[rule]["optim"].items() if key != "nesterov"}
        for layout in (Parallel(tensor=2), piped):
            losses = train("tiny", 8, BATCH["tiny"], parallel=layout, sync=engine, optim=optim).losses
            assert all(math.isfinite(loss) for loss in losses), engine


def test_shards_that_put_off_a_part_of_their_updates_stay_in_step():
    """The two groups of shards send other chunks, and each update of LARS adds up norms over both."""
    engine = {**SPARSE, "sparsity": 0.75, "timing": "hybrid", "threshold_mb": 0}
    at_once = {**engine, "timing": "lazy"}
    for put_off, expected in run(4, _sparse_shards, [engine, at_once]):
        assert put_off == pytest.approx(expected, rel=1e-5)


def _sparse_shards(engines: list[dict[str, Any]]) -> list[list[float]]:
    return [train("tiny", 20, 12, 0.05, Parallel(tensor=2), sync=sync, optim=LARS).losses for sync in engines]
