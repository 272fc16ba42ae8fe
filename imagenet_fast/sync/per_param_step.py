"""A torch optimizer's step, applied later and layer by layer with the same result as at once.

A deferring engine updates a layer just before it is read again. By then a schedule may have changed the
hyper-parameters, so they are copied when the step is taken. The optimizer sees only the parameters that are due.
torch's optimizers keep their state per parameter, so the result is that of one ``optimizer.step()``, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import optimizer as torch_hooks
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync.engine import Elements
from imagenet_fast.sync.pending import Update, settle_all

_ONE_BY_ONE: frozenset[type[Optimizer]] = frozenset({
    optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Muon, optim.Adagrad, optim.Adadelta, optim.Adafactor,
    optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
})  # fmt: skip
"""Optimizers that update each parameter from its own gradient and state."""

_AMP_INPUTS = ("grad_scale", "found_inf")
"""Attributes of an optimizer that ``torch.amp.GradScaler`` sets for one step."""

_Settings = dict[str, Any]
"""A parameter group's settings by name, without its parameters."""


def snapshot_step(optimizer: Optimizer, at_once: bool = False) -> Callable[..., None]:
    """Return ``optimizer.step()`` with the hyper-parameters of this moment, for ``GradientPool.step``.

    The schedule may be advanced at once: for ``lr_scheduler`` the step has been taken. The attributes ``grad_scale``
    and ``found_inf``, which ``torch.amp.GradScaler`` sets, are hyper-parameters too.

    Args:
        optimizer: The optimizer.
        at_once: Whether the function is called now, once, with all of the optimizer's parameters that have gradients.

    Returns:
        A function that updates the parameters in the list passed to it, in any order and over any number of calls, and
        leaves all others alone. A second argument becomes the optimizer's attribute ``elements`` meanwhile: the slices
        of each parameter that it may update. If ``needs_all``, it is ``optimizer.step()`` itself: it needs all
        parameters in one call, before the schedule changes. It then raises RuntimeError if it gets only some of them.

    Raises:
        ValueError: The optimizer's ``step`` requires a closure.
    """
    kind = type(optimizer)
    if kind not in _ONE_BY_ONE and _requires_closure(kind):  # type: ignore[arg-type]  # classes can be hashed
        raise ValueError(
            f"{kind.__name__}.step() requires a closure that repeats forward and backward, but the gradients of a pool "
            "are those of one: take an optimizer whose step() needs no argument, such as torch.optim.AdamW"
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what the scheduler's wrapper of `step` would do
    if at_once:
        return partial(_step, optimizer)
    return partial(_step_all, optimizer) if needs_all(optimizer) else _Parts(optimizer)


def needs_all(optimizer: Optimizer) -> bool:
    """Return whether all parameters of ``optimizer`` must be updated at once.

    They must in three cases:

    - torch does not have the optimizer, and its attribute ``one_by_one`` is not set, which says that it updates each
      parameter from that one's gradient and state: it may use several together, as LAMB does for a global norm;
    - its ``step`` was replaced;
    - it has step hooks, which run once per step and see all of it.
    """
    if type(optimizer) not in _ONE_BY_ONE and not getattr(optimizer, "one_by_one", False):
        return True
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_hooks._global_optimizer_pre_hooks, torch_hooks._global_optimizer_post_hooks,
    )  # fmt: skip
    return any(hooks) or _is_replaced(optimizer)


def settle_before_state(optimizer: Optimizer) -> None:
    """Carry out pending updates before the optimizer is copied or pickled, and before its state is saved or loaded.

    ``state_dict()`` and ``load_state_dict()`` get hooks. A second call changes nothing.
    """
    if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return  # a wrapper that is no whole Optimizer: ``needs_all``, so that nothing of it is deferred
    if _settle_params not in optimizer._optimizer_state_dict_pre_hooks.values():
        optimizer.register_state_dict_pre_hook(_settle_params, prepend=True)
        optimizer.register_load_state_dict_pre_hook(_settle_params, prepend=True)
        optimizer.__dict__["__getstate__"] = partial(_settled_state, optimizer)


def _settle_params(optimizer: Optimizer, *state: object) -> None:
    settle_all(param for group in optimizer.param_groups for param in group["params"])


def _settled_state(optimizer: Optimizer) -> Any:
    _settle_params(optimizer)
    return type(optimizer).__getstate__(optimizer)


@dataclass(frozen=True)
class InTurn:
    """An update that calls ``updates`` in their order, and ``then`` with the parameters alone."""

    updates: Sequence[Update]
    then: Sequence[Update]

    def __call__(self, params: list[nn.Parameter], *elements: Elements) -> None:
        """Update ``params``, or the ``elements`` of them."""
        for update in self.updates:
            update(params, *elements)
        for update in self.then:
            update(params)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of this step that the updates read, besides gradients."""
        return [x for update in self.updates for x in getattr(update, "inputs", ())]


class _Parts:
    """A step of ``optimizer`` in parts, each with the hyper-parameters of when this was created."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings: list[_Settings] = []
        self._group_of: dict[nn.Parameter, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            self._settings.append({key: _copied(value) for key, value in group.items() if key != "params"})
            self._group_of |= dict.fromkeys(group["params"], number)
        self._inputs = {name: vars(optimizer)[name] for name in _AMP_INPUTS if name in vars(optimizer)}

    @property
    def inputs(self) -> list[Tensor]:
        """The hyper-parameters that are tensors."""
        values = [value for settings in (*self._settings, self._inputs) for value in settings.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def __call__(self, params: list[nn.Parameter], elements: Elements | None = None) -> None:
        due: dict[int, list[nn.Parameter]] = {}
        for param in params:
            if param in self._group_of:
                due.setdefault(self._group_of[param], []).append(param)
        if not due:
            return
        inputs = self._inputs if elements is None else {**self._inputs, "elements": elements}
        groups = [{**self._settings[number], "params": some} for number, some in due.items()]
        own, kind = vars(self._optimizer), type(self._optimizer)
        twin = object.__new__(kind)  # with its state; its own groups are the schedule's, perhaps in another thread
        vars(twin).update(own | inputs, param_groups=groups)
        # torch's wrapper of `step` names it in profiles, which we keep, and runs hooks, which we skip: there were
        # none when this step was taken, and those registered since are not for it.
        with torch.profiler.record_function(f"Optimizer.step#{kind.__name__}.step"):
            inspect.unwrap(kind.step, stop=lambda step: not hasattr(step, "hooked"))(twin)
        if kind not in _ONE_BY_ONE and (
            _numbers(vars(twin)) != _numbers(own)
            or any(_numbers(group) != _numbers(self._settings[n]) for n, group in zip(due, groups, strict=True))
        ):
            raise RuntimeError(
                f"{kind.__name__} counts its steps in itself or in its groups, and would count every part of one; keep "
                "such counts in optimizer.state[param], or leave out one_by_one"
            )


def _numbers(attributes: Mapping[str, Any]) -> _Settings:
    """Return the numbers among the attributes of an optimizer, or the settings of a group."""
    return {name: value for name, value in attributes.items() if type(value) in (int, float) and name[0] != "_"}


def _step_all(optimizer: Optimizer, params: list[nn.Parameter], elements: Elements | None = None) -> None:
    given = set(params)
    left = sum(p.grad is not None and p not in given for group in optimizer.param_groups for p in group["params"])
    if left:
        raise RuntimeError(
            f"{type(optimizer).__name__} updates its parameters all at once, but {left} that have a gradient are not "
            "due: see needs_all for why, and give parameters that are not in this pool an optimizer of their own"
        )
    _step(optimizer, params, elements)


def _step(optimizer: Optimizer, _: list[nn.Parameter], elements: Elements | None = None) -> None:
    if elements is not None:
        optimizer.elements = elements  # type: ignore[attr-defined]  # ours have it
    try:
        optimizer.step()
    finally:
        if elements is not None:
            optimizer.elements = None  # type: ignore[attr-defined]


@cache
def _requires_closure(kind: type[Optimizer]) -> bool:
    _, *arguments = inspect.signature(kind.step).parameters.values()
    return any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)


def _is_replaced(optimizer: Optimizer) -> bool:
    """Return whether ``step`` was set on the optimizer itself by anything but an ``lr_scheduler``."""
    own = vars(optimizer).get("step")
    return own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step


def _copied(value: Any) -> Any:
    """Return a copy of a hyper-parameter: a learning rate, or betas, may be tensors that a schedule fills."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
