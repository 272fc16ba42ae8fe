"""The networks: torchvision's names, the papers' shapes, how weights begin, pieces that compile one by one."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
import torchvision.models
from torch import nn

from imagenet_fast.models import build_model, compile_blocks
from imagenet_fast.recipe.schema import AlexNet, AlexNetBN, CifarNet, Model, ResNet
from tests.conftest import tiers

NETWORKS: dict[str, Model] = {
    "alexnet": AlexNet(kind="alexnet"),
    "alexnet_bn": AlexNetBN(kind="alexnet_bn", pool5_norm=True),
    "resnet18": ResNet(kind="resnet18"),
    "resnet50": ResNet(kind="resnet50", zero_init_last_gamma=True),
    "cifarnet": CifarNet(kind="cifarnet", widths=(64, 128, 128)),
}


@pytest.mark.parametrize("zero_gamma", [False, True])
@pytest.mark.parametrize("kind", tiers(["resnet18"], ["alexnet", "resnet50"]))
def test_fresh_models_are_torchvisions_to_the_bit(kind: str, zero_gamma: bool):
    torch.manual_seed(3)
    ours = build_model(NETWORKS[kind].model_copy(update={"zero_init_last_gamma": zero_gamma}), 10)
    torch.manual_seed(3)
    options = {} if kind == "alexnet" else {"zero_init_residual": zero_gamma}
    theirs = getattr(torchvision.models, kind)(num_classes=10, **options)
    ours.eval(), theirs.eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_alexnet_with_batch_norm_is_nvidia_caffes():
    """61 M parameters but for the norms' statistics; grouped convolutions; norms that neither scale nor shift."""
    with torch.device("meta"):
        model = build_model(NETWORKS["alexnet_bn"], 1000)
        logits = model(torch.zeros(2, 3, 227, 227))
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.groups) for c in convolutions] == [(96, 1), (256, 2), (384, 1), (384, 2), (256, 2)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [n.num_features for n in norms] == [96, 256, 384, 384, 256]
    assert not any(list(n.parameters()) for n in norms)
    assert sum(p.numel() for p in model.parameters()) == 60_965_224
    assert logits.shape == (2, 1000)


@pytest.mark.ci
def test_alexnet_with_batch_norm_begins_as_nvidia_caffes():
    """The values of train_val2.prototxt, with which its LARC solvers train; fc6 and fc7 have others than the rest."""
    torch.manual_seed(0)
    model = build_model(NETWORKS["alexnet_bn"], 10)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for number, layer in enumerate(layers):
        hidden = number in (5, 6)
        assert (layer.bias == (0.1 if hidden else 0.01)).all()
        assert layer.weight.std().item() == pytest.approx(0.005 if hidden else 0.01, rel=0.05)


COMPOSERS = ("kaiming_normal", "bn_uniform", "linear_log_constant_bias")
"""The rules of its mild recipe."""


@pytest.mark.ci
def test_all_rules_of_composers_mild_recipe():
    torch.manual_seed(0)
    model = build_model(ResNet(kind="resnet50", init=COMPOSERS), 100)
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


PIECES = {"alexnet": 2, "alexnet_bn": 2, "resnet18": 1 + 8, "resnet50": 1 + 16, "cifarnet": 3}
"""The stem and the residual blocks, two halves, or groups."""


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize("kind", PIECES)
def test_compiling_a_model_changes_no_name_of_its_weights(kind: str):
    with torch.device("meta"):
        model, untouched = build_model(NETWORKS[kind], 10), build_model(NETWORKS[kind], 10)
    compile_blocks(model)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]


@pytest.mark.usefixtures("subprocesses")
def test_a_copy_of_a_compiled_model_has_a_stem_of_its_own():
    """As an average over steps is, where one is kept."""
    model = build_model(NETWORKS["resnet18"], 10).eval()
    compile_blocks(model)
    copy = deepcopy(model)
    nn.init.zeros_(model.conv1.weight)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        images = torch.randn(1, 3, 32, 32)
        assert not torch.equal(copy(images), model(images))
