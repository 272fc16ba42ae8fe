"""Large layers in shards: cut and gathered, what they drop, send, skip and refuse."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.parallel.parallelize import ParallelModel, parallelize
from imagenet_fast.parallel.pool_group import PoolGroup
from imagenet_fast.parallel.tensor_parallel import ColumnParallel, RowParallel, gathered
from imagenet_fast.recipe.optim_config import Lars
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.sync import AutoSync, DearSync, EngineSettings, GradientPool, HybridSync, LazySync
from imagenet_fast.sync.comm_stream import Transfer
from imagenet_fast.training.optimizers import build_optimizer
from tests.conftest import tiers
from tests.parallel.small import CLASSES, Tiny, images_of, small_model
from tests.ranks import with_ranks


def sharded(model: nn.Module, tensor: int = 2) -> ParallelModel:
    return parallelize(Parallel(tensor=tensor), model, torch.empty(0), nullcontext())


@pytest.mark.parametrize("kind", ["tiny", pytest.param("alexnet_bn", marks=pytest.mark.ci)])
@with_ranks(2)
def test_gathered_it_is_the_model_that_was_sharded(kind: str) -> None:
    whole, model = small_model(kind), small_model(kind)
    assert gathered(model) is model, "without shards"
    division = sharded(model)
    first, second, *_ = (m for m in model.modules() if isinstance(m, nn.Linear))
    assert isinstance(first, ColumnParallel)
    assert isinstance(second, RowParallel)
    assert list(division.shards) == [first.weight, first.bias, second.weight]
    assert first.weight.shape[0] == second.weight.shape[1] == (6 if kind == "tiny" else 128)
    again = division.whole(model)
    assert first in set(model.modules()), "the model itself stays as it is"
    assert model.state_dict().keys() == again.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    own, _ = images_of(kind, 7 + dist.get_rank(), 2)
    model.eval(), whole.eval(), again.eval()
    torch.testing.assert_close(model(own), whole(own), rtol=1e-5, atol=1e-6)
    if dist.get_rank() == 0:  # each rank by itself, with as many images as it likes
        torch.testing.assert_close(again(own[:1]), whole(own[:1]))
    division.layout.close()


@with_ranks(2)
def test_dropout_differs_between_shards_and_ranks() -> None:
    model = Tiny(dropout=0.5)
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    division = sharded(model)
    torch.manual_seed(3 + dist.get_rank())  # ranks draw numbers of their own, as in a step
    seen: list[Tensor] = []
    for number in (1, 4):
        model.classifier[number].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.classifier(torch.ones(64, 36))
    own, units = (values != 0 for values in seen)
    for mask, images in ((own, 64), (units, 128)):
        assert len(mask) == images
        assert 0.3 < mask.double().mean() < 0.7
        masks = model.classifier[1].group.gather(mask.to(torch.uint8)).chunk(2)
        assert not torch.equal(*masks), "two ranks drop the same"
    division.layout.close()


@with_ranks(2)
def test_under_autocast_activations_travel_as_they_are_multiplied() -> None:
    whole, model = small_model("tiny"), small_model("tiny")
    division = sharded(model)
    own, _ = images_of("tiny", dist.get_rank(), 4)
    with torch.autocast("cpu", torch.bfloat16):
        near, logits = whole(own), model(own)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, near, rtol=2e-2, atol=2e-2)
    assert division.activations.spent().sent_bytes == 4 * (36 + 12) * 2
    division.layout.close()


@with_ranks(2)
def test_what_activations_cost_is_counted_and_timed() -> None:
    model = small_model("tiny")
    division = sharded(model)
    pools = division.synchronised(LazySync(wire="fp32"))
    for images in (1, 3):
        Transfer.record = []
        pools.zero_grad()
        own, _ = images_of("tiny", dist.get_rank(), images)
        model(own).sum().backward()
        stats = pools.finish()
        sent = [one.sent_bytes for one in Transfer.record if one.label == "activations"]
        assert sent == [4 * images * units for units in (36, 12, 12, 36)], "forth and back, to one other rank"
        assert stats.sent_bytes > sum(sent), "gradients of the other layers"
        assert stats.exposed.seconds() > 0
    Transfer.record = None
    pools.close()


def test_all_is_closed_though_one_pool_fails_as_it_ends():
    closed: list[str] = []
    pools = [GradientPool(nn.Linear(2, 2), LazySync()) for _ in range(2)]
    for pool in pools:
        pool.engine.close = lambda: closed.append("engine") or 1 / 0
    with pytest.raises(ZeroDivisionError):
        PoolGroup(pools, lambda x: x, lambda: None, lambda: closed.append("layout")).close()
    assert closed == ["engine", "engine", "layout"]


@with_ranks(2)
def test_auto_defers_no_update_of_shards() -> None:
    """Groups of shards may choose different engines, and LARS takes the norms of whole layers over all of them."""
    pools = sharded(small_model("tiny")).synchronised(AutoSync(wire="fp32"))
    assert isinstance(pools, PoolGroup)
    of_shards, of_the_rest = (
        {candidate.settings.awaits for candidate in pool.engine._electable.values()}  # type: ignore[attr-defined]
        for pool in pools._pools
    )
    assert "read" in of_the_rest - of_shards
    pools.close()


ENGINES = (LazySync(wire="fp32"), HybridSync(wire="fp32"), DearSync(wire="fp32"))


@pytest.mark.parametrize("tensor", tiers([2], [2, 4]))
@pytest.mark.parametrize("settings", tiers(ENGINES[1:2], ENGINES), ids=lambda settings: settings.kind)
@with_ranks(4)
def test_all_ranks_skip_a_step_in_which_one_shard_overflows(settings: EngineSettings, tensor: int) -> None:
    model = small_model("tiny")
    division = sharded(model, tensor)
    pools = division.synchronised(settings)
    pools.guard(1e30)
    optimizer = build_optimizer(Lars(kind="lars", lr=0.1, weight_decay=0.0), model, whole_norms=division.whole_norms)
    spoilt = math.nan if dist.get_rank() == 1 else 1.0
    weights = gathered(model).state_dict()
    for step, factor in enumerate((spoilt, 1.0, spoilt)):
        hook = model.classifier[4].weight.register_hook(lambda gradient, by=factor: gradient * by)
        pools.zero_grad()
        images, labels = images_of("tiny", dist.get_rank(), 2)
        nn.functional.cross_entropy(model(images), labels).backward()
        pools.end_backward()
        found = pools.found_inf
        assert found.item() == (step != 1)
        optimizer.found_inf = found
        pools.step(optimizer)
        hook.remove()
        pools.settle()
        before, weights = weights, gathered(model).state_dict()
        assert all(torch.equal(before[name], weights[name]) == (step != 1) for name in weights), step
    pools.close()


@with_ranks(4)
def test_a_frozen_layer_and_one_without_bias_are_sharded_too() -> None:
    model, whole = Tiny(), Tiny()
    for one in (model, whole):
        torch.manual_seed(1)
        one.classifier[1] = nn.Linear(36, 12, bias=False)
        one.classifier[4] = nn.Linear(12, 12, bias=False).requires_grad_(False)
        one.classifier[6] = nn.Linear(12, CLASSES)
        one.features.requires_grad_(False)
    whole.load_state_dict(model.state_dict())
    division = sharded(model)
    pools = division.synchronised(LazySync(wire="fp32"))
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


@with_ranks(4)
def test_of_shards_of_another_stage_nothing_is_kept() -> None:
    layout = Parallel(tensor=2, pipeline=2, micro_batches=2)
    division = parallelize(layout, Tiny(), torch.empty(2, 3, 5, 5), nullcontext())
    gc.collect()
    own = set(division.own.parameters())
    kept = [p for p in gc.get_objects() if isinstance(p, nn.Parameter) and not p.is_meta]
    assert len(kept) == len(own)
    assert set(kept) == own
    division.layout.close()
