"""Define the small network for CIFAR-10 of Jordan's "94% on CIFAR-10 in 3.29 seconds" (arXiv 2404.00498).

A frozen convolution whitens patches of 2 x 2 pixels, then come three groups of two convolutions, and a linear layer
whose logits are scaled down. Convolutions begin as identities where they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PATCH = 2  # side in pixels
_PATCH_VALUES = 3 * _PATCH**2
_EPSILON = 5e-4
"""Added to the variances that whitening divides by: noise is not blown up."""


class ConvGroup(nn.Module):
    """Two 3 x 3 convolutions with norms; the first is followed by a pooling that halves the side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build the group from ``inputs`` to ``outputs`` channels."""
        super().__init__()
        self.conv1 = _convolution(inputs, outputs)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = _norm(outputs)
        self.conv2 = _convolution(outputs, outputs)
        self.norm2 = _norm(outputs)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the group's output [N, outputs, H // 2, W // 2] for its input ``x`` [N, inputs, H, W]."""
        out = self.activation(self.norm1(self.pool(self.conv1(x))))
        activated: Tensor = self.activation(self.norm2(self.conv2(out)))
        return activated


class ScaledLinear(nn.Linear):
    """A linear layer whose outputs are multiplied by a constant, so that training begins with small logits."""

    scale: ClassVar[float] = 1 / 9

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled outputs for ``x`` [N, inputs]."""
        return super().forward(x) * self.scale


class CifarNet(nn.Sequential):
    """The network from images [N, 3, H, W] to logits [N, classes], for H and W of at least 16."""

    def __init__(self, classes: int, widths: Sequence[int]) -> None:
        """Build the network with fresh weights; those of ``whiten`` are random until ``set_whitening``.

        Args:
            classes: Number of classes.
            widths: Channels of the three groups.
        """
        super().__init__()
        first, second, third = widths
        self.whiten = nn.Conv2d(3, 2 * _PATCH_VALUES, _PATCH)
        assert self.whiten.bias is not None
        nn.init.zeros_(self.whiten.bias)
        self.whiten.weight.requires_grad_(False)
        self.activation = nn.GELU()
        self.group1 = ConvGroup(2 * _PATCH_VALUES, first)
        self.group2 = ConvGroup(first, second)
        self.group3 = ConvGroup(second, third)
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.flatten = nn.Flatten()
        self.head = ScaledLinear(third, classes)

    @torch.no_grad()
    def set_whitening(self, images: Iterable[Tensor]) -> None:
        """Set the weights of ``whiten`` from batches of normalised ``images``: ``whitening_filters`` in both signs."""
        filters = whitening_filters(images)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def whitening_filters(images: Iterable[Tensor]) -> Tensor:
    """Return filters [12, 3, 2, 2] whose responses to patches of ``images``, batches [N, 3, H, W], are uncorrelated.

    The mean square of each response is v / (v + 5e-4), where v is an eigenvalue of the patches' second moments; the
    largest v is first.
    """
    moments, count = torch.zeros(()), 0
    for batch in images:
        patches = F.unfold(batch.float(), _PATCH).transpose(1, 2).flatten(0, 1)
        moments = moments + (patches.T @ patches).double()
        count += len(patches)
    variances, directions = torch.linalg.eigh(moments / count)
    filters: Tensor = (directions / (variances + _EPSILON).sqrt()).T.flip(0)
    return filters.reshape(-1, 3, _PATCH, _PATCH).float()


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution whose first outputs begin as copies of its inputs."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(layer.weight[:inputs])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm whose scale stays 1, and whose statistics follow the last few batches."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
