"""The ``[optim]`` and ``[schedule]`` tables of a recipe: how weights are updated, at which learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from imagenet_fast.recipe.base import Fraction, Table


class Sgd(Table):
    """SGD with momentum."""

    kind: Literal["sgd"]
    lr: PositiveFloat
    """Peak learning rate, at the end of the warm-up; above 0."""
    momentum: Fraction = 0.9
    """Momentum, from 0 to below 1."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""
    weight_decay: NonNegativeFloat
    """Weight decay; 0: none."""
    decay_all: bool = False
    """Whether biases and norm layers are decayed too."""
    decoupled: bool = False
    """Whether weight decay is decoupled from the gradient and from the peak rate (Loshchilov and Hutter).

    Each step then multiplies weights by 1 - ``weight_decay`` x (rate / ``lr``), as Composer's DecoupledSGDW does.
    """
    norm_bias_factor: PositiveFloat = 1.0
    """Factor of the learning rate for biases of norm layers; above 0. Their decay stays the same."""


class Lars(Table):
    """LARS (You et al., arXiv 1708.03888).

    Norm layers take plain SGD steps without decay.
    """

    kind: Literal["lars"]
    lr: PositiveFloat
    """Peak learning rate, at the end of the warm-up; above 0."""
    momentum: Fraction = 0.9
    """Momentum, from 0 to below 1."""
    weight_decay: NonNegativeFloat
    """Weight decay; 0: none."""
    trust_coefficient: PositiveFloat = 0.001
    """Factor of each layer's trust ratio (eta in the paper); above 0."""
    epsilon: NonNegativeFloat = 0.0
    """Number added to the denominator of the trust ratio; unused with ``clip``."""
    clip: bool = False
    """Whether to limit each layer's rate to at most ``lr`` instead of multiplying by ``lr``: NVCaffe's LARC."""
    biases: Literal["plain", "scaled"] = "plain"
    """Update rule for biases.

    ``plain``: SGD steps at ``lr`` without decay, as in MLPerf's ResNet-50. ``scaled``: each bias is decayed and has a
    rate of its own, as weights do, as in NVCaffe's AlexNet.
    """


Optim = Annotated[Sgd | Lars, Field(discriminator="kind")]


class Warmup(Table):
    """A learning rate that rises from ``start_lr`` to the optimizer's ``lr`` over ``warmup_epochs``."""

    warmup_epochs: NonNegativeFloat = 0.0
    """Length of the warm-up, in epochs, at most ``epochs``; 0: no warm-up."""
    start_lr: NonNegativeFloat = 0.0
    """Learning rate from which the warm-up rises."""
    warmup_power: PositiveFloat = 1.0
    """Exponent of the warm-up, above 0: the rate above ``start_lr`` rises as (t/T)^warmup_power.

    1: linearly. 2: quadratically, as in NVIDIA Caffe.
    """


class Polynomial(Warmup):
    """Polynomial decay from the optimizer's ``lr`` down to ``end_lr``.

    The rate above ``end_lr`` falls as (1 - t/T)^power, where t and T are counted from ``decay_from``.
    """

    kind: Literal["polynomial"]
    power: PositiveFloat = 2.0
    """Exponent of the decay; above 0."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Step from which the decay is counted.

    ``warmup``: the end of the warm-up, as in MLPerf. ``start``: the first step, as in Caffe; then the rate drops at the
    end of the warm-up to what the decay has reached by then.
    """
    end_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of training."""


class StepDecay(Warmup):
    """Decay by a factor of ``gamma`` at each of ``milestones``."""

    kind: Literal["step"]
    milestones: tuple[PositiveFloat, ...]
    """Epochs, each above 0, at which the learning rate is multiplied by ``gamma``."""
    gamma: PositiveFloat = 0.1
    """Factor at each milestone; above 0."""


class Cosine(Warmup):
    """Decay along half a cosine from the optimizer's ``lr`` down to ``end_lr``, after the warm-up."""

    kind: Literal["cosine"]
    end_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of training."""


Schedule = Annotated[Polynomial | StepDecay | Cosine, Field(discriminator="kind")]
