"""A moving average of a model's weights, each moved when its weight is updated."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn


class ModelEma:
    """A copy of ``model`` that follows it: a <- decay a + (1 - decay) w, once an update of w.

    torch's ``AveragedModel`` (with ``get_ema_multi_avg_fn`` and ``use_buffers``) does it to a whole model; here any of
    its parameters will do, so an engine may put updates off. As there, the first update copies.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model)
        """The average, to be evaluated and saved."""
        self._model = model
        self._decay = decay
        self._average_of = dict(zip(model.parameters(), self.module.parameters(), strict=True))
        self._begun: set[Tensor] = set()

    def update(self, params: Iterable[nn.Parameter]) -> None:
        """Follow these parameters of the model, which have just been updated."""
        self._follow((self._average_of[param], param) for param in params)

    def update_buffers(self) -> None:
        """Follow the model's buffers, at the end of a step. Whole numbers, such as counts of batches, are copied."""
        self._follow(zip(self.module.buffers(), self._model.buffers(), strict=True))

    def state_dict(self) -> list[str]:
        """The names of those parameters and buffers that have been copied; :attr:`module` is saved as such."""
        return [name for name, tensor in _named(self.module) if tensor in self._begun]

    def load_state_dict(self, begun: Collection[str]) -> None:
        """Continue from :meth:`state_dict`'s value, with a :attr:`module` that has been filled."""
        self._begun = {tensor for name, tensor in _named(self.module) if name in begun}

    @torch.no_grad()
    def _follow(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        copied: list[tuple[Tensor, Tensor]] = []
        moved: list[tuple[Tensor, Tensor]] = []
        for average, value in pairs:
            known = average in self._begun and value.is_floating_point()
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
