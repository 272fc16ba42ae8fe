"""Define ResNet (He et al., arXiv 1512.03385) with torchvision's names, its order of layers and its initialisation.

torchvision's own class would do, but importing torchvision loads torch's compiler, which doubles the time that a rank
takes to start. A block with a stride has it in its 3 x 3 convolution (NVIDIA's ResNet v1.5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from imagenet_fast.models.fused_norm import FusedBatchNorm2d, Images


class BasicBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions, for ResNet-18."""

    expansion: ClassVar[int] = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        """Build the block from ``inplanes`` to ``planes`` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = FusedBatchNorm2d(planes, relu="after")
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = FusedBatchNorm2d(planes, relu="after")
        self.downsample = downsample

    def forward(self, x: Images) -> Images:
        """Return the block's output for its input ``x``."""
        x, shortcut = x if isinstance(x, tuple) else (x, x)
        out = self.conv2(self.bn1(self.conv1(x)))
        activated: Images = self.bn2(out, shortcut if self.downsample is None else self.downsample(shortcut))
        return activated


class Bottleneck(nn.Module):
    """Residual block of a 1 x 1, a 3 x 3 and a 1 x 1 convolution, for ResNet-50."""

    expansion: ClassVar[int] = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        """Build the block from ``inplanes`` to 4 x ``planes`` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = FusedBatchNorm2d(planes, relu="after")
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = FusedBatchNorm2d(planes, relu="after")
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = FusedBatchNorm2d(planes * self.expansion, relu="after")
        self.downsample = downsample

    def forward(self, x: Images) -> Images:
        """Return the block's output for its input ``x``."""
        x, shortcut = x if isinstance(x, tuple) else (x, x)
        out = self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x)))))
        activated: Images = self.bn3(out, shortcut if self.downsample is None else self.downsample(shortcut))
        return activated


def _stem(conv: nn.Module, norm: nn.Module, pool: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = pool(norm(conv(images)))
    return out


class ResNet(nn.Module):
    """ResNet from images [N, 3, H, W] to logits [N, classes]."""

    _stem: Callable[..., Tensor] = staticmethod(_stem)

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], num_classes: int = 1000,
        zero_init_residual: bool = False,
    ) -> None:  # fmt: skip
        """Build the network with fresh weights, for one seed those of torchvision's.

        Args:
            block: Kind of residual block.
            layers: Number of blocks in each of the four layers.
            num_classes: Number of classes.
            zero_init_residual: Whether the scale of each block's last norm begins at 0.
        """
        super().__init__()
        self._channels = 64
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = FusedBatchNorm2d(64, relu="after")
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._layer(block, 64, layers[0], 1)
        self.layer2 = self._layer(block, 128, layers[1], 2)
        self.layer3 = self._layer(block, 256, layers[2], 2)
        self.layer4 = self._layer(block, 512, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self._channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
                last = module.bn2 if isinstance(module, BasicBlock) else module.bn3
                nn.init.zeros_(last.weight)

    def _layer(self, block: type[BasicBlock | Bottleneck], planes: int, blocks: int, stride: int) -> nn.Sequential:
        outputs = planes * block.expansion
        downsample = None
        if stride != 1 or self._channels != outputs:
            downsample = nn.Sequential(
                nn.Conv2d(self._channels, outputs, 1, stride, bias=False), FusedBatchNorm2d(outputs)
            )
        first = block(self._channels, planes, stride, downsample)
        self._channels = outputs
        return nn.Sequential(first, *(block(outputs, planes) for _ in range(blocks - 1)))

    def compile_stem(self, **options: Any) -> None:
        """Compile the first three layers as one block, with ``torch.compile`` and its ``options``.

        They are no module of their own, or they would lose torchvision's names.
        """
        self._stem = torch.compile(_stem, **options)

    def fork_blocks(self) -> None:
        """Have fused norms return the output of each block but the last twice, for the next one and its shortcut."""
        for block in [*self.layer1, *self.layer2, *self.layer3, *self.layer4][:-1]:
            (block.bn2 if isinstance(block, BasicBlock) else block.bn3).forks = True

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes] for images [N, 3, H, W]."""
        for param in (self.conv1.weight, self.bn1.weight, self.bn1.bias):
            param.detach()  # whose update may be pending, which would break compiled code into pieces
        features = self._stem(self.conv1, self.bn1, self.maxpool, images)
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits
