"""Build the networks that a recipe's ``[model]`` table names.

State dicts have torchvision's names where torchvision has the model.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import nn

from imagenet_fast.errors import UserError, warn
from imagenet_fast.models.alexnet import CompilableSequential, alexnet, alexnet_bn
from imagenet_fast.models.blurpool import add_blurpool
from imagenet_fast.models.cifarnet import CifarNet, ConvGroup
from imagenet_fast.models.compiler import check_compiler
from imagenet_fast.models.external import build_external
from imagenet_fast.models.fused_norm import FusedBatchNorm2d, unusable
from imagenet_fast.models.initialization import initialize
from imagenet_fast.models.resnet import BasicBlock, Bottleneck, ResNet
from imagenet_fast.recipe import schema
from imagenet_fast.recipe.network import ExternalModel

_VARIANTS = 100_000  # more than the blocks of a network times the sizes of images


def build_model(model: schema.Model, classes: int) -> nn.Module:
    """Build the model a recipe names, on the default device.

    Fresh weights come from torch's global generator.

    Args:
        model: The recipe's model table.
        classes: Number of classes.

    Raises:
        UserError: A network defined elsewhere cannot be built.
    """
    network: nn.Module
    match model:
        case schema.AlexNet():
            network = alexnet(classes, model.dropout)
        case schema.AlexNetBN():
            network = alexnet_bn(classes, model.dropout, model.pool5_norm)
        case schema.ResNet(kind="resnet18"):
            network = ResNet(BasicBlock, (2, 2, 2, 2), classes, model.zero_init_last_gamma)
        case schema.ResNet():
            network = ResNet(Bottleneck, (3, 4, 6, 3), classes, model.zero_init_last_gamma)
        case schema.CifarNet():
            network = CifarNet(classes, model.widths)
        case ExternalModel():
            network = build_external(model, classes)
        case _:
            assert_never(model)
    if model.blurpool != "off":
        add_blurpool(network, model.blurpool)
    if model.init:
        initialize(network, model.init, classes)
    return network


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of ``model`` in place.

    These are a ResNet's stem and residual blocks, AlexNet's two halves, or a CifarNet's groups of convolutions.

    A model compiled as a whole yields every gradient only at the end of backward, which leaves nothing to overlap
    (pytorch issue 109774). Sizes are compiled as constants. By default torch does so only until it meets a second size.
    It treats all blocks as one function, which is called with images of always different sizes.

    Raises:
        UserError: This node lacks what ``torch.compile`` needs.
    """
    from torch._dynamo import config

    check_compiler()
    # Above 8 variants of a function torch runs it uncompiled, and to torch all blocks of all models are one function.
    config.recompile_limit = config.accumulated_recompile_limit = _VARIANTS
    if isinstance(model, ResNet):
        model.compile_stem(dynamic=False)
    for piece in model.modules():
        if isinstance(piece, BasicBlock | Bottleneck | CompilableSequential | ConvGroup):
            piece.compile(dynamic=False)


def fuse_norms(
    model: nn.Module, recipe: schema.Recipe, device: torch.device, dtype: torch.dtype, tells: bool = True
) -> None:
    """Have kernels compute norms in training, if ``recipe`` lets them; else ``tells`` of a GPU that cannot run them.

    Raises:
        UserError: The recipe asks for the kernels, and they cannot compute in ``dtype`` on ``device``.
    """
    asked = getattr(recipe.model, "fused_norm", False)
    if not asked or not any(isinstance(module, FusedBatchNorm2d) for module in model.modules()):
        return
    if why := recipe.unfusable or unusable(device, dtype):
        if asked is True:
            raise UserError(f"model.fused_norm true fuses norms, and {why}; set model.fused_norm to 'auto'")
        if tells and device.type == "cuda" and not recipe.unfusable:
            warn(f"norms are torch's own, not fused: {why}")
        return
    for module in list(model.modules()):
        match module:
            case FusedBatchNorm2d():
                module.fused = True
            case CompilableSequential():
                module.give_relus_to_norms()
            case ResNet():
                module.fork_blocks()
