"""The layer that shows it first, in networks of any build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imagenet_fast.models.resnet import BasicBlock, ResNet
from imagenet_fast.recipe import schema
from imagenet_fast.training.nonfinite import is_finite, trace_nonfinite
from tests.models.narrow import narrow_model

SMALL = {
    "alexnet": (schema.AlexNet(kind="alexnet"), 63),
    "alexnet_bn": (schema.AlexNetBN(kind="alexnet_bn"), 67),
    "resnet18": (schema.ResNet(kind="resnet18"), 32),
    "resnet50": (schema.ResNet(kind="resnet50"), 32),
}


def first(model: nn.Module, *inputs: Any, **named: Any) -> str | None:
    """By name; None: no layer is."""
    with trace_nonfinite(model) as watch:
        model(*inputs, **named)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return next((name for name, module in model.named_modules() if module is watch.first), None)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("alexnet", "features.6"),
        ("alexnet", "classifier.6"),
        ("alexnet_bn", "features.4"),
        ("resnet18", "conv1"),
        ("resnet18", "layer3.1.bn2"),
        ("resnet50", "layer2.0.downsample.0"),
        ("resnet50", "fc"),
    ],
)
def test_it_is_named_in_every_model_of_the_table(kind: str, layer: str):
    settings, size = SMALL[kind]
    torch.manual_seed(0)
    model = narrow_model(settings, 5)
    images = torch.randn(2, 3, size, size)
    assert first(model, images) is None
    with torch.no_grad():
        model.get_submodule(layer).weight[0].fill_(torch.inf)  # of one channel, which all layers behind it read
    assert first(model, images) == layer


class Odd(nn.Module):
    """A layer called twice, tuples, keywords and dictionaries, and arithmetic between the layers."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4, bias=False)
        self.pair = Pair(wrong)
        self.wrong = wrong
        nn.init.constant_(self.twice.weight, 1e20)

    def forward(self, values: Tensor, *, scale: dict[str, Tensor], times: int = 1) -> dict[str, Any]:
        values = self.twice(values)
        if self.wrong == "twice":
            values = self.twice(values)
        if self.wrong == "itself":
            values = values * 1e30 * 1e30
        some, (other, *_) = self.pair(values, scale=scale["by"], number=torch.tensor(3))
        return {"logits": (some, [other]), "times": times, "name": None}


class Pair(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, values: Tensor, scale: Tensor, number: Tensor) -> tuple[Tensor, list[Tensor]]:
        return values, [values - torch.inf if self.wrong == "pair" else values * scale, number]


@pytest.mark.parametrize(("wrong", "name"), [("", None), ("twice", "twice"), ("pair", "pair"), ("itself", "")])
def test_it_may_be_called_twice_and_return_anything(wrong: str, name: str | None):
    assert first(Odd(wrong), torch.ones(2, 4), scale={"by": torch.ones(())}) == name


def test_what_comes_in_is_no_layers_fault_be_it_by_keyword():
    for inputs, scale in ((torch.full((2, 4), torch.nan), 1.0), (torch.ones(2, 4), torch.inf)):
        model = Odd()
        with trace_nonfinite(model) as watch:
            model(inputs, scale={"by": torch.tensor(scale)})
        assert watch.arrived_so
        assert watch.first is None


def test_an_overflow_of_16_bits_is_seen_where_it_happens():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        model[0].weight.fill_(300.0)
        model[2].weight.fill_(300.0)
    with torch.autocast("cpu", torch.float16):
        assert first(model, torch.ones(4, 8)) == "2"
    with torch.autocast("cpu", torch.bfloat16):
        assert first(model, torch.ones(4, 8)) is None


def test_compiled_layers_are_looked_at_all_the_same():
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
    model.compile_stem(backend="eager")
    model.layer3[0].compile(backend="eager")
    model(torch.randn(2, 3, 32, 32))
    for layer in ("bn1", "layer3.0.conv2"):
        with torch.no_grad():
            model.get_submodule(layer).weight[0].fill_(torch.inf)
        assert first(model, torch.randn(2, 3, 32, 32)) == layer
        nn.init.ones_(model.get_submodule(layer).weight)


def test_modules_are_listed_as_they_are_called():
    model = Odd()
    with trace_nonfinite(model) as watch:
        model(torch.ones(2, 4), scale={"by": torch.ones(())})
    assert [*watch.called] == [model, model.twice, model.pair]


def test_only_floating_point_can_be_other_than_finite():
    assert is_finite([torch.tensor([2**31 - 1]), (torch.tensor(True), {"a": None, "b": "nan"}), torch.empty(0)])
    assert not is_finite({"a": [torch.zeros(2), torch.tensor([0.0, torch.nan], dtype=torch.bfloat16)]})
    assert not is_finite((torch.tensor(complex(0, float("inf"))),))
