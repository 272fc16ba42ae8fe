"""Blur before subsampling, so that strided layers do not alias (Zhang, ICML 2019, arXiv 1904.11486).

The layers have no parameter or buffer of their own: names of weights and checkpoints are those of the plain network.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

_FEWEST_CHANNELS = 16
"""Convolutions of fewer input channels, as of an image, are left alone, as in Composer and FFCV."""


def blurred(values: Tensor, stride: int | tuple[int, int] = 1) -> Tensor:
    """Filter each channel by the 3 x 3 binomial filter, (1 2 1) by (1 2 1) over 16, with zeros around the edges.

    It is the mean over 2 x 2 pixels taken twice, which is faster than a convolution for each channel.

    Args:
        values: Feature maps [n, channels, height, width].
        stride: Distance of the pixels of the result.
    """
    return avg_pool2d(avg_pool2d(values, 2, 1, padding=1), 2, stride)


class BlurConv2d(nn.Conv2d):
    """A convolution of blurred maps."""

    def forward(self, input: Tensor) -> Tensor:
        """Blur and convolve."""
        return super().forward(blurred(input))


class BlurMaxPool2d(nn.MaxPool2d):
    """Max pooling at stride 1, blurred and subsampled."""

    def forward(self, input: Tensor) -> Tensor:
        """Take maxima, blur and subsample."""
        maxima = max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation, self.ceil_mode)
        return blurred(maxima, self.stride)


def add_blurpool(model: nn.Module, layers: Literal["conv", "conv_maxpool"]) -> None:
    """Blur the inputs of strided convolutions of at least 16 channels in ``model``, in place.

    Args:
        model: The network.
        layers: "conv_maxpool" also blurs strided max pooling.
    """
    for layer in model.modules():
        if type(layer) is nn.Conv2d and max(layer.stride) > 1 and layer.in_channels >= _FEWEST_CHANNELS:
            layer.__class__ = BlurConv2d
        elif type(layer) is nn.MaxPool2d and layers == "conv_maxpool" and _is_strided(layer.stride):
            layer.__class__ = BlurMaxPool2d


def _is_strided(stride: int | tuple[int, ...]) -> bool:
    return (stride if isinstance(stride, int) else max(stride)) > 1
