"""The moving average is torch's, and moves with each weight."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tests
from imagenet_fast.data.loaders import Batch, build_loaders
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.train_step import TrainingStep, build_step
from tests.conftest import tables
from tests.ranks import run


class MixedModel(nn.Module):
    """With channels_last weights, a tied and a frozen one, statistics, and parameters and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.short = nn.Parameter(torch.randn(9).bfloat16())
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))


def changed(model: MixedModel, step: int) -> list[nn.Parameter]:
    """Stand in for a step of training; in one of them the gradients overflow and the weights stand still."""
    generator = torch.Generator().manual_seed(step)
    trainable = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for param in trainable if step != 3 else []:
            param.add_(torch.randn(param.shape, generator=generator))
        for buffer in (model.norm.running_mean, model.norm.running_var, model.seen):
            buffer.add_(torch.randn(buffer.shape, generator=generator))
        model.norm.num_batches_tracked.add_(3)
    return trainable


def test_it_is_torchs_to_the_bit_whatever_the_order_of_the_layers():
    model = MixedModel()
    average = ModelEma(model, 0.9)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    order = random.Random(0)
    for step in range(6):
        params = changed(model, step)
        order.shuffle(params)
        average.update(params[:2])
        average.update_buffers()
        for param in params[2:]:
            average.update([param])
        expected.update_parameters(model)
        state, other = average.module.state_dict(), expected.module.state_dict()
        assert state.keys() == other.keys()
        for name, tensor in state.items():
            if tensor.is_floating_point():
                assert torch.equal(tensor, other[name]), (step, name)
    assert average.module.norm.num_batches_tracked == model.norm.num_batches_tracked == 18
    assert average.module.head.weight is average.module.embedding.weight


def test_average_under_a_deferring_engine():
    run(2, _train_with_hybrid)


def _train_with_hybrid() -> None:
    """Compare the average after three steps, before it is settled and then, with torch's of weights settled every
    step."""
    take_step, batches = _begun(ema_decay=0.9)
    average = take_step.state.average
    assert average is not None
    for _ in range(3):
        take_step(batches, lr=0.1)
    waiting = average.module.get_parameter("head.weight").detach().clone()
    take_step.state.settle()
    take_step.state.sync.close()

    take_step, batches = _begun()
    model = take_step.state.model
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        take_step(batches, lr=0.1)
        take_step.state.settle()
        expected.update_parameters(model)
    take_step.state.sync.close()

    settled, at_once = average.module.state_dict(), expected.module.state_dict()
    assert settled.keys() == at_once.keys()
    for name, tensor in settled.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, at_once[name]), name
    assert not torch.equal(waiting, settled["head.weight"]), "its update had been put off"


def _begun(**changes: Any) -> tuple[TrainingStep, Iterator[Batch]]:
    model = {"kind": "cifarnet", "widths": [4, 5, 6]}
    recipe = parse_recipe("test", tables(sync={"kind": "hybrid", "wire": "fp32"}, model=model, **changes))
    world, batching = tests.world(), split_batch(recipe, 2)
    dataset = build_loaders(recipe.data, None, batching, world.rank, 1, world.device, recipe.seed)
    return build_step(recipe, batching, build_initial_model(recipe, 10, world), world, 4), dataset.train
