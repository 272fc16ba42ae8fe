"""The networks: torchvision's names, the papers' shapes, pieces that compile one by one."""

from __future__ import annotations

import pytest
import torch
import torchvision.models
from torch import nn

from imagenet_fast.models import build_model, compile_blocks
from imagenet_fast.recipe.schema import AlexNet, AlexNetBN, Model, ResNet

NETWORKS: dict[str, Model] = {
    "alexnet": AlexNet(kind="alexnet"),
    "alexnet_bn": AlexNetBN(kind="alexnet_bn", pool5_norm=True),
    "resnet18": ResNet(kind="resnet18"),
    "resnet50": ResNet(kind="resnet50", zero_init_last_gamma=True),
}


@pytest.mark.parametrize("kind", ["alexnet", "resnet18", "resnet50"])
def test_weights_carry_torchvisions_names_and_shapes(kind: str):
    with torch.device("meta"):
        ours = build_model(NETWORKS[kind], 1000).state_dict()
        theirs = getattr(torchvision.models, kind)().state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_alexnet_with_batch_norm_is_nvidia_caffes():
    """61 M parameters but for the norms' statistics; grouped convolutions; norms that neither scale nor shift."""
    model = build_model(NETWORKS["alexnet_bn"], 1000)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.groups) for c in convolutions] == [(96, 1), (256, 2), (384, 1), (384, 2), (256, 2)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [n.num_features for n in norms] == [96, 256, 384, 384, 256]
    assert not any(list(n.parameters()) for n in norms)
    assert sum(p.numel() for p in model.parameters()) == 60_965_224
    assert model(torch.zeros(2, 3, 227, 227)).shape == (2, 1000)


def test_a_zeroed_gamma_makes_residual_blocks_begin_as_identities():
    model = build_model(NETWORKS["resnet50"], 10)
    last = [m.bn3.weight for m in model.modules() if isinstance(m, torchvision.models.resnet.Bottleneck)]
    assert len(last) == 16
    assert not any(weight.any() for weight in last)


@pytest.mark.parametrize(("kind", "pieces"), [("alexnet", 2), ("alexnet_bn", 2), ("resnet18", 8), ("resnet50", 16)])
def test_a_model_is_compiled_in_pieces(kind: str, pieces: int):
    with torch.device("meta"):
        model = build_model(NETWORKS[kind], 10)
    compile_blocks(model)
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == pieces
