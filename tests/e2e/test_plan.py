"""Every shipped recipe, planned at the world size it was written for, on torch's fake process group."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import tests
from imagenet_fast.data.sampler import TrainSampler
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.models import build_model
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.load import find_recipe, load_recipe, recipe_names
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.lr_schedule import learning_rate
from imagenet_fast.training.train_step import build_step

IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000, "digits": 1_433}
CLASSES = {"imagenet": 1000, "cifar10": 10, "digits": 10}
SMALLEST = 67
"""Pixels that every network takes; of larger images shapes are enough to know that one takes them."""


@pytest.fixture(params=recipe_names())
def planned(request: pytest.FixtureRequest) -> Iterator[tuple[Recipe, DistContext]]:
    recipe = load_recipe(find_recipe(request.param))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=recipe.ranks)
    yield recipe, tests.world(0, recipe.ranks, 0, min(8, recipe.ranks))
    dist.destroy_process_group()
    gc.collect()  # each has hundreds of MB


def test_a_recipe_can_be_trained_at_its_full_size(planned: tuple[Recipe, DistContext]):
    recipe, world = planned
    dataset = getattr(recipe.data, "dataset", None)
    images = IMAGES[dataset] if dataset else recipe.data.train_images
    classes = CLASSES[dataset] if dataset else recipe.data.classes

    batching = split_batch(recipe, recipe.ranks)
    assert batching.global_batch == recipe.global_batch
    assert batching.accumulation == (2 if recipe.micro_batch else 1)
    order = TrainSampler(images, batching, rank=recipe.ranks - 1, seed=recipe.seed)
    assert len(next(iter(order)).images) == batching.micro_batch
    steps_per_epoch = order.steps_per_epoch
    assert steps_per_epoch == images // recipe.global_batch

    steps = steps_per_epoch * recipe.epochs
    rates = [learning_rate(recipe.schedule, recipe.optim.lr, s, steps_per_epoch, recipe.epochs) for s in range(steps)]
    assert max(rates) == pytest.approx(recipe.optim.lr, rel=0.01)
    assert rates[-1] < 0.05 * max(rates)
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)

    model = build_initial_model(recipe, classes, world)
    before = [p.detach().clone() for p in model.parameters()]
    names = ("small", "large") if recipe.sync.kind == "hybrid" else ("collective",)
    native = recipe.sync.model_copy(update=dict.fromkeys(names, "native"))  # the fake group receives no messages
    recipe = recipe.model_copy(update={"sync": native})
    take_step = build_step(recipe, Batching(recipe.ranks, 2, batching.accumulation), model, world, steps_per_epoch=4)
    with torch.device("meta"):
        whole = torch.empty(2, 3, recipe.data.image_size, recipe.data.image_size)
        assert build_model(recipe.model, classes)(whole).shape == (2, classes)
    size = min(recipe.data.image_size, SMALLEST)
    pixels = torch.randn(2, size, size, 3).permute(0, 3, 1, 2)
    take_step(iter([(pixels, torch.tensor([1, 2]))] * batching.accumulation), lr=0.01)
    take_step.state.settle()

    after = list(model.parameters())
    assert all(p.isfinite().all() for p in after)
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    idle = 16 if getattr(recipe.model, "zero_init_last_gamma", False) else 0  # norms behind a gamma of zero
    idle += sum(not p.requires_grad for p in after)
    assert sum(changed) == len(changed) - idle
    shards = {new for old, new in zip(before, after, strict=True) if old.shape != new.shape}
    assert len(shards) == (3 if recipe.parallel.tensor > 1 else 0), "both weights and the first layer's bias"
    wire = sum(p.numel() for p in after if p not in shards and p.requires_grad) * (
        4 if recipe.sync.wire == "fp32" else 2
    )
    share = 2 * (recipe.ranks - 1) / recipe.ranks
    image = 2 * (recipe.parallel.tensor - 1) * (9216 + 4096) * 2  # what comes to the layers and leaves them, and back
    sent = share * wire + 2 * batching.accumulation * image
    assert take_step.state.sent_bytes == pytest.approx(sent, rel=4e-3)  # tensors are padded to a multiple of the ranks


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("alexnet-1gpu", 61_100_840), ("alexnet-512gpu", 60_965_224), ("resnet50-8gpu", 25_557_032)],
)
def test_models_have_their_published_size(name: str, parameters: int):
    with torch.device("meta"):
        model = build_model(load_recipe(find_recipe(name)).model, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters
