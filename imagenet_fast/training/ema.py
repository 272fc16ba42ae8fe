"""Keep an exponential moving average of a model's weights, updated parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class ModelEma:
    """Moving average of ``model``'s weights: a <- decay a + (1 - decay) w, once per update of w.

    As timm's and Composer's, it begins with the weights of the untrained model. torch's ``AveragedModel`` updates a
    whole model, and this class any of its parameters, so an engine may defer some.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start the average from a copy of ``model``."""
        self.module = copy.deepcopy(model)
        """The averaged model, to be evaluated and saved."""
        self._model = model
        self._decay = decay
        self._average_of = dict(zip(model.parameters(), self.module.parameters(), strict=True))
        norms = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        self._statistics = {b for norm in norms for b in norm.buffers() if b.is_floating_point()}

    def update(self, params: Iterable[nn.Parameter], elements: object = None) -> None:
        """Update the average of ``params``, parameters of the model that have just been updated.

        All their elements are averaged, also where an engine has sent only some ``elements``.
        """
        self._move((self._average_of[param], param) for param in params)

    @torch.no_grad()
    def update_buffers(self) -> None:
        """Update the average of the norms' statistics, at the end of a step. Other buffers, as masks, are copied."""
        pairs = list(zip(self.module.buffers(), self._model.buffers(), strict=True))
        self._move(pair for pair in pairs if pair[0] in self._statistics)
        if copied := [pair for pair in pairs if pair[0] not in self._statistics]:
            averages, values = zip(*copied, strict=True)
            torch._foreach_copy_(averages, values)

    @torch.no_grad()
    def _move(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        if moved := list(pairs):
            averages, values = zip(*moved, strict=True)
            torch._foreach_lerp_(averages, values, 1 - self._decay)
