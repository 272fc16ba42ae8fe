"""Blur before subsampling, so that strided layers do not alias (Zhang, ICML 2019, arXiv 1904.11486).

The filter is a buffer that no state dict has: names of weights are those of the plain network.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d

from imagenet_fast.errors import UserError

_FEWEST_CHANNELS = 16
"""Convolutions of fewer input channels, as of an image, are left alone, as in Composer and FFCV."""


def binomial_filter(channels: int = 1) -> Tensor:
    """Return the 3 x 3 binomial filter, (1 2 1) by (1 2 1) over 16, once a channel: fp32 [channels, 1, 3, 3]."""
    taps = torch.tensor([0.25, 0.5, 0.25])
    return torch.outer(taps, taps).repeat(channels, 1, 1, 1)


def blurred(values: Tensor, kernels: Tensor, stride: int | tuple[int, int] = 1) -> Tensor:
    """Filter each channel, with zeros around the edges.

    Args:
        values: Feature maps [n, channels, height, width].
        kernels: Filters [channels, 1, 3, 3].
        stride: Distance of the pixels of the result.
    """
    return conv2d(values, kernels, stride=stride, padding=1, groups=values.size(1))


class BlurConv2d(nn.Conv2d):
    """A convolution of blurred maps."""

    blur: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Blur and convolve."""
        return super().forward(blurred(input, self.blur))


class BlurMaxPool2d(nn.MaxPool2d):
    """Max pooling at stride 1, blurred and subsampled."""

    blur: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Take maxima, blur and subsample."""
        maxima = max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation, self.ceil_mode)
        return blurred(maxima, self.blur.expand(input.size(1), 1, 3, 3), self.stride)


def add_blurpool(model: nn.Module, layers: Literal["conv", "conv_maxpool"]) -> None:
    """Blur the inputs of strided convolutions of at least 16 channels in ``model``, in place.

    Args:
        model: The network.
        layers: "conv_maxpool" also blurs strided max pooling.

    Raises:
        UserError: There is no such layer, or one is of another class than torch's, which may pad, or rounds sizes up.
    """
    blurring: type[BlurConv2d | BlurMaxPool2d]
    for name, layer in model.named_modules():
        match layer:
            case nn.Conv2d(stride=stride, in_channels=channels) if _is_strided(stride) and channels >= _FEWEST_CHANNELS:
                blurring, kernels = BlurConv2d, binomial_filter(channels)
            case nn.MaxPool2d(stride=stride) if _is_strided(stride) and layers == "conv_maxpool":
                blurring, kernels = BlurMaxPool2d, binomial_filter()
            case _:
                continue
        usual: type[nn.Module] = blurring.__mro__[1]
        if type(layer) is not usual or getattr(layer, "ceil_mode", False):
            raise UserError(
                f"model.blurpool '{layers}' cannot blur {name}, a {type(layer).__name__}: it knows torch's own "
                f"{usual.__name__} alone, without ceil_mode; leave it off"
            )
        layer.__class__ = blurring
        layer.register_buffer("blur", kernels, persistent=False)
    if not any(isinstance(layer, BlurConv2d | BlurMaxPool2d) for layer in model.modules()):
        raise UserError(f"model.blurpool '{layers}' blurs nothing: this network has no such layer; leave it off")


def _is_strided(stride: int | tuple[int, ...]) -> bool:
    return (stride if isinstance(stride, int) else max(stride)) > 1
