"""ResNet-18 and ResNet-50 with torchvision's names, first weights and results, to the bit.

torchvision itself is not imported: it brings torch's compiler with it, which takes every rank seconds at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions, to whose result is added what came in."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, values: Tensor) -> Tensor:
        change = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(values)))))
        change += values if self.downsample is None else self.downsample(values)
        out: Tensor = self.relu(change)
        return out


class Bottleneck(nn.Module):
    """A convolution between two that change the number of channels. It has the stride, as in NVIDIA's "v1.5"."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, values: Tensor) -> Tensor:
        change = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(values))))))
        change = self.bn3(self.conv3(change))
        change += values if self.downsample is None else self.downsample(values)
        out: Tensor = self.relu(change)
        return out


class ResNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, classes]. ``blocks``: how many at each of four resolutions.

    The first four layers can be compiled as one piece although they are no module of their own: moved into one, they
    would lose torchvision's names.
    """

    _compiled_stem: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: tuple[int, int, int, int],
        classes: int,
        zero_last_gamma: bool,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        e = block.expansion
        self.layer1 = _blocks(block, 64, 64, blocks[0], 1)
        self.layer2 = _blocks(block, 64 * e, 128, blocks[1], 2)
        self.layer3 = _blocks(block, 128 * e, 256, blocks[2], 2)
        self.layer4 = _blocks(block, 256 * e, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * e, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock | Bottleneck) and zero_last_gamma:
                nn.init.zeros_(module.last_norm.weight)

    def compile_stem(self, **options: Any) -> None:
        """Have the stem run through ``torch.compile``, as ``nn.Module.compile`` has a module."""
        self._compiled_stem = torch.compile(self._stem, **options)

    def _stem(self, images: Tensor) -> Tensor:
        out: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return out

    def forward(self, images: Tensor) -> Tensor:
        stem = self._compiled_stem or self._stem
        features = self.layer4(self.layer3(self.layer2(self.layer1(stem(images)))))
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not compiled, as torch has it for modules; the stem would read this model's weights."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch has not typed it
        state.pop("_compiled_stem", None)
        return state


def _blocks(block: type[BasicBlock | Bottleneck], inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
    rest = [block(width * block.expansion, width) for _ in range(count - 1)]
    return nn.Sequential(block(inputs, width, stride), *rest)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Brings what comes in to the shape of what goes out, where that is another."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
