"""Every shipped recipe, planned at the world size it was written for."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch

import tests
from imagenet_fast.bench.fake_step import fake_ranks
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.models import build_model
from imagenet_fast.plan.prediction import IMAGES
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.load import load_recipe, shipped
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.lr_schedule import learning_rate
from imagenet_fast.training.training_step import build_step

CLASSES = {"imagenet": 1000, "cifar10": 10, "digits": 10}
SMALLEST = 67
"""Pixels that every network takes."""


def of_data(recipe: Recipe, counts: dict[str, int], key: str) -> int:
    count: int = getattr(recipe.data, key, 0) or counts[recipe.data.dataset]
    return count


@pytest.mark.parametrize("name", shipped("recipe"))
def test_a_shipped_recipe_is_planned_and_its_network_built(name: str):
    recipe = load_recipe(name)
    batching, images = split_batch(recipe, recipe.reference_ranks), of_data(recipe, IMAGES, "train_images")
    assert batching.global_batch == recipe.global_batch
    assert batching.accumulation == (2 if recipe.micro_batch else 1)
    order = TrainSampler(images, batching, rank=recipe.reference_ranks - 1, seed=recipe.seed)
    assert len(next(iter(order)).images) == batching.micro_batch
    assert order.steps_per_epoch == images // recipe.global_batch

    each = order.steps_per_epoch
    steps = (*range(0, each * recipe.epochs, max(1, each // 40)), each * recipe.epochs - 1)
    rates = [learning_rate(recipe.schedule, recipe.optim.lr, step, each, recipe.epochs) for step in steps]
    assert max(rates) == pytest.approx(recipe.optim.lr, rel=0.01)
    assert rates[-1] < 0.05 * max(rates)
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)

    classes, size = of_data(recipe, CLASSES, "classes"), recipe.data.image_size
    with torch.device("meta"):
        model = build_model(recipe.model, classes)
        assert model(torch.empty(2, 3, size, size)).shape == (2, classes)


@pytest.fixture(params=shipped("recipe"))
def planned(request: pytest.FixtureRequest) -> Iterator[tuple[Recipe, DistContext]]:
    """On torch's fake process group."""
    recipe = load_recipe(request.param)
    with fake_ranks(0, recipe.reference_ranks):
        yield recipe, tests.world(0, recipe.reference_ranks, 0, min(8, recipe.reference_ranks))
    gc.collect()  # each has hundreds of MB


@pytest.mark.weekly
def test_a_step_at_full_size_changes_all_weights_and_sends_what_is_counted(planned: tuple[Recipe, DistContext]):
    recipe, world = planned
    accumulation = split_batch(recipe, recipe.reference_ranks).accumulation
    model = build_initial_model(recipe, of_data(recipe, CLASSES, "classes"), world)
    before = [p.detach().clone() for p in model.parameters()]
    names = ("small", "large") if recipe.sync.kind == "hybrid" else ("collective",)
    native = recipe.sync.model_copy(update=dict.fromkeys(names, "native"))  # the fake group receives no messages
    recipe = recipe.model_copy(update={"sync": native})
    take_step = build_step(recipe, Batching(recipe.reference_ranks, 2, accumulation), model, world, steps_per_epoch=4)
    size = min(recipe.data.image_size, SMALLEST)
    pixels = torch.randn(2, size, size, 3).permute(0, 3, 1, 2)
    take_step(iter([(pixels, torch.tensor([1, 2]))] * accumulation), lr=0.01)
    take_step.state.settle()

    after = list(model.parameters())
    assert all(p.isfinite().all() for p in after)
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    idle = 16 if getattr(recipe.model, "zero_init_last_gamma", False) else 0  # norms behind a gamma of zero
    idle += sum(not p.requires_grad for p in after)
    assert sum(changed) == len(changed) - idle
    shards = {new for old, new in zip(before, after, strict=True) if old.shape != new.shape}
    assert len(shards) == (3 if recipe.parallel.tensor > 1 else 0), "both weights and the first layer's bias"
    values = sum(p.numel() for p in after if p not in shards and p.requires_grad)
    share = 2 * (recipe.reference_ranks - 1) / recipe.reference_ranks * (4 if recipe.sync.wire == "fp32" else 2)
    per_value = 2 if world.bf16 else 4
    image = 2 * (recipe.parallel.tensor - 1) * (9216 + 4096) * per_value  # to the layers, from them, and back
    sent = share * values + 2 * accumulation * image
    assert take_step.state.sent_bytes == pytest.approx(sent, rel=4e-3)  # tensors are padded to a multiple of the ranks
    take_step.state.sync.close()
