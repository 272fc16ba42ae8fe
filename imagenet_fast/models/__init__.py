"""The networks, by a recipe's ``[model]`` table. State dicts carry torchvision's names where it has the model."""

from __future__ import annotations

from typing import assert_never

from torch import nn
from torch._dynamo import config
from torchvision.models import alexnet as torchvision_alexnet
from torchvision.models.resnet import BasicBlock, Bottleneck

from imagenet_fast.models.alexnet import AlexNetBN
from imagenet_fast.models.half import CompilableSequential
from imagenet_fast.models.resnet import ResNet
from imagenet_fast.recipe import schema

_FORMS = 3
"""In which a piece is compiled: for training, for evaluation, and for the smaller batch that ends an evaluation."""


def build_model(model: schema.Model, classes: int) -> nn.Module:
    """The model a recipe names, with fresh weights from torch's global generator, on the default device."""
    network: nn.Module
    match model:
        case schema.AlexNet():
            theirs = torchvision_alexnet(num_classes=classes, dropout=model.dropout)
            theirs.features, theirs.classifier = (
                CompilableSequential(*theirs.features),
                CompilableSequential(*theirs.classifier),
            )
            network = theirs
        case schema.AlexNetBN():
            network = AlexNetBN(classes, model.dropout, model.pool5_norm)
        case schema.ResNet():
            block, blocks = (BasicBlock, [2, 2, 2, 2]) if model.kind == "resnet18" else (Bottleneck, [3, 4, 6, 3])
            network = ResNet(block, blocks, num_classes=classes, zero_init_residual=model.zero_init_last_gamma)
        case _:
            assert_never(model)
    return network


def compile_blocks(model: nn.Module) -> None:
    """torch.compile the pieces of ``model`` in place: a ResNet's stem and residual blocks, or AlexNet's two halves.

    A model compiled whole surfaces every gradient at the end of backward and leaves nothing to overlap
    (pytorch issue 109774). Sizes are constants to the compiler. Left to itself it takes them for such only until it
    meets a second one, and to it all blocks are one function, called with images of ever other sizes.
    """
    if isinstance(model, ResNet):
        model.compile_stem(dynamic=False)
    pieces = [m for m in model.modules() if isinstance(m, BasicBlock | Bottleneck | CompilableSequential)]
    for piece in pieces:
        piece.compile(dynamic=False)
    _allow_compilations(_FORMS * len(pieces))


def _allow_compilations(more: int) -> None:
    """Raise the number of forms in which torch compiles one function before it runs it uncompiled, which is 8.

    All blocks are one function to it, in every model of this process. A form that fits several blocks is made once, so
    fewer are made than are allowed.
    """
    config.recompile_limit += more
    config.accumulated_recompile_limit += more
