"""BlurPool against the published formula and FFCV's and Composer's placement."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d

from imagenet_fast.cli.export import write_weights_for_others
from imagenet_fast.errors import UserError
from imagenet_fast.models import build_model
from imagenet_fast.models.blurpool import BlurConv2d, BlurMaxPool2d, add_blurpool, binomial_filter, blurred
from imagenet_fast.models.weights import write_weights
from imagenet_fast.recipe.schema import ResNet

BINOMIAL = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16


def by_channel(values: Tensor, stride: int = 1) -> Tensor:
    """The filter as Zhang publishes it, one channel after the other."""
    channels = [conv2d(channel[:, None], BINOMIAL[None, None], padding=1) for channel in values.unbind(1)]
    return torch.cat(channels, 1)[:, :, ::stride, ::stride]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("sides", [(1, 1), (2, 5), (8, 8), (7, 11)])
def test_the_filter_is_the_binomial(sides: tuple[int, int], stride: int):
    values = torch.randn(2, 5, *sides)
    torch.testing.assert_close(blurred(values, binomial_filter(5), stride), by_channel(values, stride))


def test_layers_blur_then_convolve_and_blur_maxima():
    model = nn.Sequential(nn.Conv2d(16, 8, 3, 2, padding=1), nn.MaxPool2d(3, 2, padding=1))
    conv, pool = copy.deepcopy(model)
    values = torch.randn(2, 16, 9, 9)
    add_blurpool(model, "conv_maxpool")
    assert (type(model[0]), type(model[1])) == (BlurConv2d, BlurMaxPool2d)
    convolved = conv(by_channel(values))
    torch.testing.assert_close(model[0](values), convolved)
    torch.testing.assert_close(model[1](values), by_channel(max_pool2d(values, 3, 1, padding=1), 2))
    assert model(values).shape == pool(conv(values)).shape
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize(("layers", "pools"), [("conv", 0), ("conv_maxpool", 1)])
@pytest.mark.parametrize("kind", ["resnet18", pytest.param("resnet50", marks=pytest.mark.ci)])
def test_names_and_shapes_stay_torchvisions(kind: str, layers: str, pools: int):
    with torch.device("meta"):
        ours = build_model(ResNet(kind=kind, blurpool=layers), 1000)
        theirs = getattr(torchvision.models, kind)()
        assert ours(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    assert sum(isinstance(m, BlurConv2d) for m in ours.modules()) == 6, "all strided ones but the stem"
    assert sum(isinstance(m, BlurMaxPool2d) for m in ours.modules()) == pools


class SamePadding(nn.Conv2d): ...


@pytest.mark.parametrize("layer", [SamePadding(16, 16, 3, stride=2), nn.MaxPool2d(3, 2, ceil_mode=True)])
def test_layers_that_it_cannot_blur_are_refused_and_not_passed_over(layer: nn.Module):
    with pytest.raises(UserError, match=f"cannot blur 1, a {type(layer).__name__}: it knows torch's own .* ceil_mode;"):
        add_blurpool(nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), layer), "conv_maxpool")


def test_an_export_without_the_trained_blur_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Names of weights are the same."""
    trained = ResNet(kind="resnet18", blurpool="conv")
    given, out = tmp_path / "trained.safetensors", tmp_path / "exported.safetensors"
    write_weights(build_model(trained, 10).state_dict(), given, {"model": trained.model_dump()})
    write_weights_for_others(given, "cifar10-resnet18", [], "safetensors", out)
    assert "was trained with model.blurpool 'conv', and this network has 'off'" in capsys.readouterr().err
