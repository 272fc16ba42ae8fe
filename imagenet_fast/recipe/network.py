"""The keys of every ``[model]`` table of a recipe, and the tables of networks that this program does not define."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from imagenet_fast.recipe.base import Table

Init = Literal["kaiming_normal", "bn_uniform", "linear_log_constant_bias"]
"""Rule that initialises some weights of any network; the names are Composer's."""


class Network(Table):
    """Settings of every network."""

    sharded_width: ClassVar[int] = 0
    """Units of the fully connected layers that ``parallel.tensor`` divides; 0: it has no such layers."""
    smallest_image: ClassVar[int] = 1
    """Smallest side of images that it takes, in pixels."""

    blurpool: Literal["off", "conv", "conv_maxpool"] = "off"
    """Layers that blur their input before they subsample it, against aliasing (BlurPool, Zhang 2019).

    ``conv``: strided convolutions of at least 16 channels, as in FFCV. ``conv_maxpool``: strided max pooling too, as in
    Composer. Names of weights stay the same.
    """
    init: tuple[Init, ...] = ()
    """Rules that initialise weights instead of the network's own, one after the other.

    ``kaiming_normal``: weights of convolutions and linear layers, by their inputs. ``bn_uniform``: scales of batch
    norms, between 0 and 1. ``linear_log_constant_bias``: the last layer's biases, -log(classes), which suits ``loss`` =
    ``bce``.
    """

    @property
    def most_stages(self) -> int:
        """Largest number of pipeline stages that the model can be split into."""
        return 1000

    @property
    def label(self) -> str:
        """Name of the network in tables and logs."""
        name: str = getattr(self, "name", "") or getattr(self, "kind")  # noqa: B009  (subclasses have them)
        return name


class NormedNetwork(Network):
    """Settings of networks whose batch norms this program has kernels for."""

    fused_norm: bool | Literal["auto"] = "auto"
    """Whether to train batch norms by this program's GPU kernels, which also do the adds and ReLUs around them.

    They read and write less memory. Weights end the same up to rounding. ``auto``: on GPUs, with ``channels_last`` and
    without ``compile``, if a first norm agrees with torch's. true: always; else the run ends. false: torch's norms.
    """


class ExternalModel(Network):
    """A network that is defined elsewhere."""

    kind: Literal["torchvision", "timm", "python"]
    """``torchvision``: Any classifier of torchvision, with fresh weights. ``timm``: Any model of timm (the extra
    ``timm``), with fresh weights. ``python``: A network that a function of your own builds.
    """
    name: str
    """Name of the network.

    ``torchvision``, ``timm``: as in their lists of models. ``python``: a function, as ``my_package.models:build``, that
    is called with the number of classes and returns a torch.nn.Module.
    """
    options: dict[str, bool | int | float | str] = Field(default={})
    """Keyword arguments for the function that builds the network, such as ``dropout``."""
