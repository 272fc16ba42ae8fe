"""Rules of initialisation against Composer's, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from imagenet_fast.models import build_model
from imagenet_fast.recipe.schema import AlexNet, ResNet

RULES = ("kaiming_normal", "bn_uniform", "linear_log_constant_bias")


@pytest.mark.ci
def test_all_rules_of_composers_mild_recipe():
    torch.manual_seed(0)
    model = build_model(ResNet(kind="resnet50", init=RULES), 100)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            inputs = module.weight[0].numel()
            assert abs(module.weight.std().item() / math.sqrt(2 / inputs) - 1) < 0.05, name
        elif isinstance(module, nn.BatchNorm2d):
            assert 0 <= module.weight.min() < 0.2 < 0.8 < module.weight.max() <= 1, name
            assert not module.bias.any()
    assert torch.equal(model.fc.bias, torch.full((100,), -math.log(100)))


def test_only_the_last_of_layers_as_wide_as_the_classes_gets_their_bias():
    plain = build_model(AlexNet(kind="alexnet", init=("linear_log_constant_bias",)), 4096)
    biases = [layer.bias.detach() for layer in plain.classifier if isinstance(layer, nn.Linear)]
    assert [torch.equal(bias, bias[:1].expand(4096)) for bias in biases] == [False, False, True]
