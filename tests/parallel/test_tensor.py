"""A model whose large layers are sharded follows one process on the joined batch."""

from __future__ import annotations

import math
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.parallel.layout import lay_out
from imagenet_fast.parallel.pools import Pools
from imagenet_fast.parallel.tensor import ColumnParallel, RowParallel, TensorGroup, gathered, shard
from imagenet_fast.recipe.schema import Lars, Parallel
from imagenet_fast.sync import DdpSync, DearSync, HybridSync, LazySync
from imagenet_fast.training.optimizers import build_optimizer
from tests.parallel.small import CLASSES, CPU, Tiny, Trained, images_of, small_model, train
from tests.spawning import run

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
    "larc": {"optim": {**LARS, "clip": True}},
    "clipped": {"optim": SGD, "clip_norm": 0.05},
    "averaged": {"optim": LARS, "ema_decay": 0.7},
}
BATCH = {"tiny": 12, "alexnet": 8, "alexnet_bn": 8}
Case = tuple[str, str, int, dict[str, Any]]
"""The model, the rule by which it is updated, ``tensor``, the engine."""


LAYOUTS = {2: (2,), 3: (3,), 4: (4, 2)}
"""By the number of ranks, over how many of them layers are sharded."""


def cases_of(world: int) -> list[Case]:
    """Every engine and every rule in each number of ranks; AlexNet, where there are two, by every engine."""
    tensor, updates = cycle(LAYOUTS[world]), cycle(("lars", "sgd"))
    cases: list[Case] = [("tiny", next(updates), next(tensor), engine) for engine in EXACT]
    cases += [("tiny", rule, next(tensor), EXACT[2 if rule == "averaged" else 0]) for rule in RULES]
    match world:
        case 2:
            cases += [("tiny", "lars", 2, engine) for engine in OTHERS]
            cases += [("alexnet", next(updates), 2, engine) for engine in EXACT]
        case 4:
            cases += [("tiny", "lars", 2, EXACT[2]), ("tiny", "lars", 4, EXACT[3])]
            cases += [("alexnet", "lars", 2, EXACT[2]), ("alexnet", "sgd", 4, EXACT[0])]
    return cases


def all_cases_of(world: int) -> list[Case]:
    updates = ("sgd", "lars")
    tiny = product(["tiny"], updates, LAYOUTS[world], [*EXACT, *OTHERS])
    return [*tiny, *product(["alexnet"], updates, LAYOUTS[world], EXACT)]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Trained]:
    return dict(run(1, _alone)[0])


def _alone() -> dict[tuple[str, str], Trained]:
    lazy = {"sync": EXACT[0]}
    expected = {("tiny", rule): train("tiny", 7, BATCH["tiny"], **lazy, **changes) for rule, changes in RULES.items()}
    assert expected["tiny", "clipped"].losses != expected["tiny", "sgd"].losses
    for rule in ("sgd", "lars"):
        expected["alexnet", rule] = train("alexnet", 5, BATCH["alexnet"], **lazy, **RULES[rule])
    return expected | {("alexnet_bn", "sgd"): train("alexnet_bn", 5, BATCH["alexnet_bn"], 0.01, **lazy, **RULES["sgd"])}


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_every_layout_and_engine_follows_one_process(world: int, alone: dict[tuple[str, str], Trained]):
    follows(alone, world, cases_of(world))


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_every_engine_follows_one_process_in_every_layout(world: int, alone: dict[tuple[str, str], Trained]):
    follows(alone, world, all_cases_of(world))


def follows(alone: dict[tuple[str, str], Trained], world: int, cases: list[Case]) -> None:
    for (kind, rule, tensor, engine), trained in run(world, _laid_out, cases)[0]:
        expected, what = alone[kind, rule], f"{kind}, {rule}, tensor {tensor} of {world}, {engine}"
        assert expected.losses[-1] < expected.losses[0], f"{what} learns"
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5), what
        assert trained.weights.keys() == expected.weights.keys()
        for name, weight in trained.weights.items():
            torch.testing.assert_close(
                weight, expected.weights[name], rtol=1e-3, atol=1e-5, msg=lambda text, at=f"{name}, {what}": at + text
            )


def _laid_out(cases: list[Case]) -> list[tuple[Case, Trained]]:
    trained = []
    for case in cases:
        kind, rule, tensor, engine = case
        steps = 7 if kind == "tiny" else 5
        trained.append((case, train(kind, steps, BATCH[kind], tensor=tensor, sync=engine, **RULES[rule])))
    return trained


def test_batch_norm_has_the_statistics_of_accumulation(alone: dict[tuple[str, str], Trained]):
    losses = run(4, _batch_norm)[0]
    assert losses == pytest.approx(alone["alexnet_bn", "sgd"].losses, rel=1e-5)


def _batch_norm() -> list[float]:
    return train("alexnet_bn", 5, BATCH["alexnet_bn"], 0.01, tensor=2, sync=EXACT[0], **RULES["sgd"]).losses


def test_engines_that_leave_something_behind_keep_all_ranks_alike_and_waiting_for_none():
    run(2, _inexact_engines)


def _inexact_engines() -> None:
    """A rank may have nothing to update where another, which asks it for norms, has."""
    for rule, engine in (
        ("lars", {**SPARSE, "sparsity": 0.9}),
        ("lars", {**SPARSE, "sparsity": 0.9, "timing": "hybrid"}),
        ("sgd", {**SPARSE, "sparsity": 0.5, "momentum_correction": True}),
        ("lars", {"kind": "powersgd", "wire": "bf16", "rank": 2}),
        ("lars", {"kind": "lazy", "wire": "int8", "bf16_steps": 2}),
        ("lars", {"kind": "auto", "wire": "bf16", "inexact": True}),
    ):
        optim = {key: value for key, value in RULES[rule]["optim"].items() if key != "nesterov"}
        losses = train("tiny", 8, BATCH["tiny"], tensor=2, sync=engine, optim=optim).losses
        assert all(math.isfinite(loss) for loss in losses), engine


def sharded(model: nn.Module, tensor: int = 2) -> TensorGroup:
    return shard(model, lay_out(Parallel(tensor=tensor), CPU))


def test_gathered_it_is_the_model_that_was_sharded():
    run(2, _gathered_again)


def _gathered_again() -> None:
    for kind in ("tiny", "alexnet_bn"):
        whole, model = small_model(kind), small_model(kind)
        assert gathered(model) is model, "without shards"
        group = sharded(model)
        first, second, *_ = (m for m in model.modules() if isinstance(m, nn.Linear))
        assert isinstance(first, ColumnParallel)
        assert isinstance(second, RowParallel)
        assert list(group.shards) == [first.weight, first.bias, second.weight]
        assert model.state_dict().keys() == whole.state_dict().keys()
        assert first.weight.shape[0] == second.weight.shape[1] == (6 if kind == "tiny" else 128)
        again = gathered(model)
        assert first in set(model.modules()), "the model itself stays as it is"
        for name, tensor in whole.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        plain = small_model(kind)
        plain.load_state_dict(again.state_dict(), strict=True)
        own, _ = images_of(kind, 7 + dist.get_rank(), 2)
        model.eval(), plain.eval(), again.eval()
        torch.testing.assert_close(model(own), plain(own), rtol=1e-5, atol=1e-6)
        if dist.get_rank() == 0:  # each rank by itself, with as many pictures as it likes
            torch.testing.assert_close(again(own[:1]), plain(own[:1]))


def test_each_shard_drops_units_of_its_own_of_all_pictures_and_each_rank_features_of_its_own():
    run(2, _dropped)


def _dropped() -> None:
    model = Tiny(dropout=0.5)
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    group = sharded(model)
    torch.manual_seed(3 + dist.get_rank())  # ranks draw numbers of their own, as in a step
    seen: list[Tensor] = []
    for number in (1, 4):
        model.classifier[number].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.classifier(torch.ones(64, 36))
    own, units = (values != 0 for values in seen)
    for mask, pictures in ((own, 64), (units, 128)):
        assert len(mask) == pictures
        assert 0.3 < mask.double().mean() < 0.7
        masks = group.gather(mask.to(torch.uint8)).chunk(2)
        assert not torch.equal(*masks), "two ranks drop the same"


def test_under_autocast_activations_travel_as_they_are_multiplied():
    run(2, _under_autocast)


def _under_autocast() -> None:
    whole, model = small_model("tiny"), small_model("tiny")
    group = sharded(model)
    own, _ = images_of("tiny", dist.get_rank(), 4)
    with torch.autocast("cpu", torch.bfloat16):
        near, logits = whole(own), model(own)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, near, rtol=2e-2, atol=2e-2)
    assert sum(t.traffic[0].sent_bytes for _, t in group.spent().transfers) == 4 * (36 + 12) * 2


def test_what_activations_cost_is_counted_and_timed():
    run(2, _counted)


def _counted() -> None:
    model = small_model("tiny")
    group = sharded(model)
    pools = Pools(model, LazySync(wire="fp32"), group)
    for pictures in (1, 3):
        pools.zero_grad()
        own, _ = images_of("tiny", dist.get_rank(), pictures)
        model(own).sum().backward()
        stats = pools.finish()
        sent = [transfer.traffic[0].sent_bytes for label, transfer in stats.transfers if label == "activations"]
        assert sent == [4 * pictures * units for units in (36, 12, 12, 36)], "forth and back, to one other rank"
        assert stats.sent_bytes > sum(sent), "gradients of the other layers"
        assert stats.exposed is not None
        assert stats.exposed.seconds() > 0
    pools.close()


def test_what_cannot_be_sharded_is_refused_in_words():
    run(2, _refused)


def _refused() -> None:
    for model, sentence in (
        (nn.Sequential(nn.Linear(4, 4)), "this model has none"),
        (odd := Tiny(), "11 units do not divide over 2 ranks"),
    ):
        if model is odd:
            odd.classifier[1] = nn.Linear(36, 11)
        with pytest.raises(ValueError, match=sentence):
            sharded(model)
    model = Tiny()
    with pytest.raises(ValueError, match="torch's DDP averages all parameters over the same ranks"):
        Pools(model, DdpSync(), sharded(model))


def test_all_ranks_skip_a_step_in_which_one_shard_overflows():
    run(4, _overflow)


def _overflow() -> None:
    for settings in (LazySync(wire="fp32"), HybridSync(wire="fp32"), DearSync(wire="fp32")):
        for tensor in (2, 4):
            model = small_model("tiny")
            group = sharded(model, tensor)
            pools = Pools(model, settings, group)
            pools.guard(1e30)
            optimizer = build_optimizer(
                Lars(kind="lars", lr=1.0, weight_decay=0.0), model, whole_norms=group.whole_norms
            )
            spoilt = math.nan if dist.get_rank() == 1 else 1.0
            weights = gathered(model).state_dict()
            for step, factor in enumerate((spoilt, 1.0, spoilt)):
                hook = model.classifier[4].weight.register_hook(lambda gradient, by=factor: gradient * by)
                pools.zero_grad()
                images, labels = images_of("tiny", dist.get_rank(), 2)
                nn.functional.cross_entropy(model(images), labels).backward()
                pools.finish()
                found = pools.found_inf
                assert found is not None
                assert found.item() == (step != 1)
                pools.update(lambda params, o=optimizer, f=found: o.step(0.1, params, f))
                hook.remove()
                pools.settle()
                before, weights = weights, gathered(model).state_dict()
                assert all(torch.equal(before[name], weights[name]) == (step != 1) for name in weights), step
            pools.close()


def test_a_frozen_layer_and_one_without_bias_are_sharded_too():
    run(4, _frozen)


def _frozen() -> None:
    model, whole = Tiny(), Tiny()
    for one in (model, whole):
        torch.manual_seed(1)
        one.classifier[1] = nn.Linear(36, 12, bias=False)
        one.classifier[4] = nn.Linear(12, 12, bias=False).requires_grad_(False)
        one.classifier[6] = nn.Linear(12, CLASSES)
        one.features.requires_grad_(False)
    whole.load_state_dict(model.state_dict())
    group = sharded(model)
    pools = Pools(model, LazySync(wire="fp32"), group)
    pools.zero_grad()
    batch, labels = images_of("tiny", 0, 8)
    place = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    nn.functional.cross_entropy(model(batch[place]), labels[place]).backward()
    pools.finish()
    nn.functional.cross_entropy(whole(batch), labels).backward()
    expected = whole.classifier[1].weight.grad.chunk(2)[dist.get_rank() % 2]
    torch.testing.assert_close(model.classifier[1].weight.grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.classifier[6].bias.grad, whole.classifier[6].bias.grad, rtol=1e-5, atol=1e-7)
    assert not gathered(model).classifier[4].weight.requires_grad
    pools.close()
