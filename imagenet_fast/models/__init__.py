"""The networks, by a recipe's ``[model]`` table. State dicts carry torchvision's names where it has the model."""

from __future__ import annotations

from typing import assert_never

from torch import nn
from torchvision.models import alexnet, resnet18, resnet50
from torchvision.models.resnet import BasicBlock, Bottleneck

from imagenet_fast.models.alexnet_bn import AlexNetBN
from imagenet_fast.recipe import schema


def build_model(model: schema.Model, classes: int) -> nn.Module:
    """The model a recipe names, with fresh weights from torch's global generator, on the default device."""
    network: nn.Module
    match model:
        case schema.AlexNet():
            network = alexnet(num_classes=classes, dropout=model.dropout)
        case schema.AlexNetBN():
            network = AlexNetBN(classes, model.dropout, model.pool5_norm)
        case schema.ResNet():
            build = resnet18 if model.kind == "resnet18" else resnet50
            network = build(num_classes=classes, zero_init_residual=model.zero_init_last_gamma)
        case _:
            assert_never(model)
    return network


def compile_blocks(model: nn.Module) -> None:
    """torch.compile the pieces of ``model`` in place: its residual blocks, or AlexNet's two halves.

    A model compiled whole surfaces every gradient at the end of backward and leaves nothing to overlap
    (pytorch issue 109774).
    """
    residual = [m for m in model.modules() if isinstance(m, BasicBlock | Bottleneck)]
    for block in residual or [m for m in model.children() if isinstance(m, nn.Sequential)]:
        block.compile()
