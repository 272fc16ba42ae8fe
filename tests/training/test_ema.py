"""The moving average is torch's, and moves with each weight."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imagenet_fast.training.ema import ModelEma


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
    expected.n_averaged.fill_(1)  # else its first update would copy
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
            if tensor.is_floating_point() and name != "seen":
                assert torch.equal(tensor, other[name]), (step, name)
        assert torch.equal(average.module.seen, model.seen), "other buffers than a norm's are the model's"
    assert average.module.norm.num_batches_tracked == model.norm.num_batches_tracked == 18
    assert average.module.head.weight is average.module.embedding.weight
