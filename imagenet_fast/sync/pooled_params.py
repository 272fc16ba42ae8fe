"""A record of which parameters are in a pool.

A parameter that is trained but is in no pool would silently diverge between ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from imagenet_fast.sync.param_slot import ParamSlot

_POOL_OF: Any = WeakIdKeyDictionary()
"""A weak reference to the pool of each parameter."""


def register(pool: object, named: Mapping[str, nn.Parameter]) -> None:
    """Record that the parameters are in ``pool``.

    Raises:
        ValueError: A parameter is in another open pool. Nothing is recorded then.
    """
    for name, param in named.items():
        if is_pooled(param):
            raise ValueError(f"{name} is in another gradient pool; close() that one before this one is made")
    for param in named.values():
        _POOL_OF[param] = weakref.ref(pool)


def forget(pool: object, params: Iterable[nn.Parameter]) -> None:
    """Record that ``params`` are no longer in ``pool``. Entries of other pools stay."""
    for param in params:
        known = _POOL_OF.get(param)
        if known is not None and known() is pool:
            del _POOL_OF[param]


def is_pooled(param: nn.Parameter) -> bool:
    """Return whether a parameter is in an open pool."""
    known = _POOL_OF.get(param)
    return known is not None and known() is not None


def check_optimizer(optimizer: Optimizer, in_pool: Mapping[nn.Parameter, ParamSlot]) -> None:
    """Check that ``optimizer`` updates parameters of this pool, and none that is in no pool.

    Args:
        optimizer: The optimizer whose parameter groups are checked.
        in_pool: The slots of this pool by parameter.

    Raises:
        ValueError: The optimizer has no parameter of this pool, or one with a gradient that is in no pool.
    """
    kind = type(optimizer).__name__
    any_here = False
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if param in in_pool:
                any_here = True
            elif param.grad is not None and not is_pooled(param):
                raise ValueError(
                    f"{kind}'s param_groups[{number}]['params'][{place}], of shape {tuple(param.shape)}, has a "
                    "gradient but is in no gradient pool, so every rank would train it for itself; make the pool of "
                    "all modules that train, after the last change of their parameters"
                )
    if not any_here:
        raise ValueError(
            f"{kind} has none of this pool's parameters, so the step would change nothing; give it the model's "
            "parameters as they are now, or, where it has copies of them, call pool.finish(), copy the gradients and "
            "call optimizer.step()"
        )


class ModelWatch:
    """A check for parameters that were added to a model or removed from it after its pool was made."""

    def __init__(self, model: nn.Module | None) -> None:
        """Record the modules of ``model``; None: check no modules."""
        self._modules = () if model is None else tuple(model.named_modules())
        self._known = {module for _, module in self._modules}

    def check(self, spans: Sequence[ParamSlot], in_pool: Mapping[nn.Parameter, ParamSlot]) -> None:
        """Check that the model's parameters are still those of the pool. Costs a loop over all parameters.

        Args:
            spans: The slots of the pool.
            in_pool: The same slots by parameter.

        Raises:
            RuntimeError: A module has another parameter than the one in the pool, or one with a gradient that is in no
                pool.
        """
        for span in spans:
            if span.module is not None and span.module._parameters.get(span.name.rpartition(".")[2]) is not span.param:
                self._check_replaced(span)
        for path, module in self._modules:
            _check_members(path, module, in_pool)
            for name, child in module._modules.items():
                if child is not None and child not in self._known:
                    for inner, new in child.named_modules(prefix=f"{path}.{name}" if path else name):
                        _check_members(inner, new, in_pool)

    def _check_replaced(self, span: ParamSlot) -> None:
        """Raise RuntimeError if the module no longer has the parameter of ``span``, under any name."""
        assert span.module is not None
        if all(param is not span.param for param in span.module._parameters.values()):  # else it only has another name
            raise RuntimeError(
                f"{span.name} is no longer the parameter that this gradient pool was made with, as after "
                "load_state_dict(assign=True) or a parametrization; make the pool and the optimizer after that"
            )


def _check_members(path: str, module: nn.Module, in_pool: Mapping[nn.Parameter, ParamSlot]) -> None:
    for name, param in module._parameters.items():
        if param is None or param in in_pool or param.grad is None or not param.requires_grad:
            continue
        if not is_pooled(param):
            raise RuntimeError(
                f"{path}.{name}".lstrip(".")
                + " has a gradient but is in no gradient pool, so every rank would train it for itself; "
                "make the pool after layers are added or unfrozen"
            )
