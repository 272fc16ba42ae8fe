"""Keep an exponential moving average of a model's weights, updated parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn


class ModelEma:
    """Moving average of ``model``'s weights: a <- decay a + (1 - decay) w, once per update of w.

    torch's ``AveragedModel`` (with ``get_ema_multi_avg_fn`` and ``use_buffers``) updates a whole model. This class can
    update any of its parameters, so an engine may defer some. As in torch, the first update copies.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start the average from a copy of ``model``."""
        self.module = copy.deepcopy(model)
        """The averaged model, to be evaluated and saved."""
        self._model = model
        self._decay = decay
        self._average_of = dict(zip(model.parameters(), self.module.parameters(), strict=True))
        self._begun: set[Tensor] = set()
        norms = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        statistics = {buffer for norm in norms for buffer in norm.buffers()}
        self._others = {buffer for buffer in self.module.buffers() if buffer not in statistics}

    def update(self, params: Iterable[nn.Parameter], elements: object = None) -> None:
        """Update the average of ``params``, parameters of the model that have just been updated.

        All their elements are averaged, also where an engine has sent only some ``elements``.
        """
        self._follow((self._average_of[param], param) for param in params)

    def update_buffers(self) -> None:
        """Update the average of the model's buffers, at the end of a step.

        Integer buffers, such as batch counts, are copied.
        """
        self._follow(zip(self.module.buffers(), self._model.buffers(), strict=True))

    def state_dict(self) -> list[str]:
        """Return the names of the parameters and buffers copied so far; the values are saved with ``module``."""
        return [name for name, tensor in _named(self.module) if tensor in self._begun]

    def load_state_dict(self, begun: Collection[str]) -> None:
        """Continue from a value of ``state_dict``; ``module`` must have been filled before."""
        self._begun = {tensor for name, tensor in _named(self.module) if name in begun}

    @torch.no_grad()
    def _follow(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        copied: list[tuple[Tensor, Tensor]] = []
        moved: list[tuple[Tensor, Tensor]] = []
        for average, value in pairs:
            known = average in self._begun and value.is_floating_point()
            if known and average in self._others:  # it may be a mask, and the mean of two infinities is NaN
                value = torch.where(average == value, value, average.lerp(value, 1 - self._decay))
                known = False
            (moved if known else copied).append((average, value))
        if copied:
            averages, values = zip(*copied, strict=True)
            torch._foreach_copy_(averages, values)
            self._begun.update(averages)
        if moved:
            averages, values = zip(*moved, strict=True)
            torch._foreach_lerp_(averages, values, 1 - self._decay)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
