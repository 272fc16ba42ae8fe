"""Initialise the weights of any network by named rules, which replace those of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.network import Init


def initialize(model: nn.Module, rules: Sequence[Init], classes: int) -> None:
    """Initialise ``model`` in place, rule after rule, from torch's global generator.

    Args:
        model: The network.
        rules: Names of Composer's initialisers.
        classes: Number of classes, by which the last layer is found.

    Raises:
        UserError: A rule needs a last layer that is linear, and there is none.
    """
    of_classes = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    last = of_classes[-1] if of_classes and of_classes[-1].bias is not None else None
    if last is None and "linear_log_constant_bias" in rules:
        raise UserError("model.init 'linear_log_constant_bias' needs a linear last layer with biases; leave it out")
    for rule in rules:
        for module in model.modules():
            match rule, module:
                case "kaiming_normal", nn.Conv2d() | nn.Linear():
                    nn.init.kaiming_normal_(module.weight)
                case "bn_uniform", nn.modules.batchnorm._BatchNorm(affine=True):
                    nn.init.uniform_(module.weight)
                    nn.init.zeros_(module.bias)
                case "linear_log_constant_bias", _ if module is last:
                    nn.init.constant_(module.bias, -math.log(classes))
