"""Initialise the weights of any network by named rules, which replace those of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from torch import nn

from imagenet_fast.recipe.network import Init


def initialize(model: nn.Module, rules: Sequence[Init], classes: int) -> None:
    """Initialise ``model`` in place, rule after rule, from torch's global generator.

    Args:
        model: The network.
        rules: Names of Composer's initialisers.
        classes: Number of classes, by which the last layer is found.
    """
    for rule in rules:
        for module in model.modules():
            match rule:
                case "kaiming_normal":
                    if isinstance(module, nn.Conv2d | nn.Linear):
                        nn.init.kaiming_normal_(module.weight)
                case "bn_uniform":
                    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                        nn.init.uniform_(module.weight)
                        nn.init.zeros_(module.bias)
                case "linear_log_constant_bias":
                    if isinstance(module, nn.Linear) and module.bias is not None and module.out_features == classes:
                        nn.init.constant_(module.bias, -math.log(classes))
                case _:
                    assert_never(rule)
