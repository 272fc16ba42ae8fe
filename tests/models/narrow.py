"""Networks with few fully connected units: making AlexNet's 60 million weights takes longer than tests with them."""

from __future__ import annotations

import torch
from torch import nn

from imagenet_fast.models import build_model
from imagenet_fast.recipe.schema import CifarNet, Model, ResNet


def narrow_model(settings: Model, classes: int, units: int = 256) -> nn.Module:
    """The network of a recipe's table in channels_last memory; AlexNets with so many ``units`` a layer, as torch
    initialises them."""
    if isinstance(settings, ResNet | CifarNet):
        return build_model(settings, classes).to(memory_format=torch.channels_last)
    with torch.device("meta"):
        model = build_model(settings, classes)
        classifier = model.get_submodule("classifier")
        connected = [name for name, layer in classifier.named_children() if isinstance(layer, nn.Linear)]
        for name, inputs, outputs in zip(connected, (9216, units, units), (units, units, classes), strict=True):
            setattr(classifier, name, nn.Linear(inputs, outputs))
    model = model.to_empty(device="cpu").to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model
