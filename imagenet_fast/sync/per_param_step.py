"""A torch optimizer's step, applied later and layer by layer with the same result as at once.

A deferring engine updates a layer just before it is read again. By then a schedule may have changed the
hyper-parameters, so they are copied when the step is taken. The optimizer sees only the parameters that are due.
torch's optimizers keep their state per parameter, so the result is that of one ``optimizer.step()``, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn, optim
from torch.optim import optimizer as torch_hooks
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync.engine import Elements

_ONE_BY_ONE: frozenset[type[Optimizer]] = frozenset({
    optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Muon, optim.Adagrad, optim.Adadelta, optim.Adafactor,
    optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
})  # fmt: skip
"""Optimizers that update each parameter from its own gradient and state."""

_AMP_INPUTS = ("grad_scale", "found_inf")
"""Attributes of an optimizer that ``torch.amp.GradScaler`` sets for one step."""

_Settings = dict[str, Any]
"""A parameter group's settings by name, without its parameters."""


def snapshot_step(optimizer: Optimizer) -> Callable[..., None]:
    """Return ``optimizer.step()`` with the hyper-parameters of this moment, for ``GradientPool.update``.

    The schedule may be advanced at once: for ``lr_scheduler`` the step has been taken. The attributes ``grad_scale``
    and ``found_inf``, which ``torch.amp.GradScaler`` sets, are hyper-parameters too.

    Args:
        optimizer: The optimizer.

    Returns:
        A function that updates the parameters in the list passed to it, in any order and over any number of calls, and
        leaves all others alone. A second argument becomes the optimizer's attribute ``elements`` meanwhile: the slices
        of each parameter that it may update. If ``needs_all``, it is ``optimizer.step()`` itself: it needs all
        parameters in one call, before the schedule changes. It then raises RuntimeError if it gets only some of them.

    Raises:
        ValueError: The optimizer's ``step`` requires a closure.
    """
    kind = type(optimizer)
    if kind not in _ONE_BY_ONE and _requires_closure(kind):
        raise ValueError(
            f"{kind.__name__}.step() requires a closure that repeats forward and backward, but the gradients of a pool "
            "are those of one: take an optimizer whose step() needs no argument, such as torch.optim.AdamW"
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what the scheduler's wrapper of `step` would do
    if needs_all(optimizer):
        return partial(_step_all, optimizer)
    return _Parts(optimizer)


def needs_all(optimizer: Optimizer) -> bool:
    """Return whether all parameters of ``optimizer`` must be updated at once.

    They must in three cases:

    - torch does not have the optimizer, and its attribute ``one_by_one`` is not set: it may use several parameters
      together, as LAMB does for a global norm;
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


def settle_before_state(optimizer: Optimizer, settle: Callable[[], None]) -> None:
    """Call ``settle`` before the optimizer is copied or pickled, and before its state is saved or loaded.

    ``state_dict()`` and ``load_state_dict()`` get hooks. A second call changes nothing.
    """
    if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return  # a wrapper that is no whole Optimizer: ``needs_all``, so that nothing of it is deferred
    hook = _Settle(WeakMethod(settle))
    if hook not in optimizer._optimizer_state_dict_pre_hooks.values():
        optimizer.register_state_dict_pre_hook(hook, prepend=True)
        optimizer.register_load_state_dict_pre_hook(hook, prepend=True)
        optimizer.__dict__["__getstate__"] = partial(_settled_state, optimizer)


def _settled_state(optimizer: Optimizer) -> Any:
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():  # one for each pool that has stepped it
        if isinstance(hook, _Settle):
            hook(optimizer)
    return type(optimizer).__getstate__(optimizer)


@dataclass(frozen=True)
class _Settle:
    """A hook that is equal to another with the same ``settle``."""

    settle: WeakMethod[Callable[[], None]]  # an optimizer may outlive many pools

    def __call__(self, optimizer: Optimizer, *state: object) -> None:
        if (alive := self.settle()) is not None:
            alive()


class _Parts:
    """A step of ``optimizer`` in parts, each with the hyper-parameters of when this was created.

    An optimizer that torch does not have may count in its groups, or in numeric attributes of its own. Every part
    starts from the same counts. What a step makes of them is kept once: for each group, the result of the first part.
    What other code, such as a schedule, has changed since then is not overwritten.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings: list[_Settings] = []
        self._group_of: dict[nn.Parameter, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            self._settings.append(_copies(group))
            self._group_of |= dict.fromkeys(group["params"], number)
        self._inputs = {name: vars(optimizer)[name] for name in _AMP_INPUTS if name in vars(optimizer)}
        self._counts = type(optimizer) not in _ONE_BY_ONE
        self._numbers = _numbers(optimizer) if self._counts else {}
        self._begun = False

    def __call__(self, params: list[nn.Parameter], elements: Elements | None = None) -> None:
        due: dict[int, list[nn.Parameter]] = {}
        for param in params:
            if param in self._group_of:
                due.setdefault(self._group_of[param], []).append(param)
        if not due:
            return
        inputs = self._inputs if elements is None else {**self._inputs, "elements": elements}
        if not self._counts:
            self._step([{**self._settings[number], "params": some} for number, some in due.items()], inputs)
            return
        groups = self._optimizer.param_groups
        if not self._begun:  # a step sees every group, also one without a due parameter
            for number in range(len(self._settings)):
                due.setdefault(number, [param for param in groups[number]["params"] if param.grad is None])
        since = _numbers(self._optimizer)
        vars(self._optimizer).update(self._numbers)
        shown = [{**_copies(self._settings[number]), "params": some} for number, some in due.items()]
        try:
            self._step(shown, inputs)
            made = _numbers(self._optimizer)
        finally:
            vars(self._optimizer).update(since)
        if not self._begun:
            self._begun = True
            _keep(self._numbers, made, vars(self._optimizer))
            for number, group in zip(due, shown, strict=True):
                _keep(self._settings[number], group, groups[number])

    def _step(self, groups: list[_Settings], inputs: Mapping[str, Any]) -> None:
        own, kind = vars(self._optimizer), type(self._optimizer)
        before = {name: own[name] for name in ("param_groups", *inputs) if name in own}
        own.update(inputs, param_groups=groups)
        try:
            # torch's wrapper of `step` names it in profiles, which we keep, and runs hooks, which we skip: there were
            # none when this step was taken, and those registered since are not for it.
            with torch.profiler.record_function(f"Optimizer.step#{kind.__name__}.step"):
                inspect.unwrap(kind.step, stop=lambda step: not hasattr(step, "hooked"))(self._optimizer)
        finally:
            for name in inputs.keys() - before.keys():
                del own[name]
            own.update(before)


def _keep(before: _Settings, made: _Settings, kept: dict[str, Any]) -> None:
    """Copy new values from ``made`` to ``kept``, except those that have changed in ``kept`` since ``before``."""
    for key, value in made.items():
        if key != "params" and not _same(value, before.get(key)) and _same(kept.get(key), before.get(key)):
            kept[key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(type(one) is type(other) and one == other)


def _numbers(optimizer: Optimizer) -> _Settings:
    """Return the attributes that a custom ``step`` may count in."""
    return {
        name: value for name, value in vars(optimizer).items() if type(value) in (int, float) and name[0] != "_"
    }  # fmt: skip


def _step_all(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    given = set(params)
    left = sum(p.grad is not None and p not in given for group in optimizer.param_groups for p in group["params"])
    if left:
        raise RuntimeError(
            f"{type(optimizer).__name__} updates its parameters all at once, but {left} that have a gradient are not "
            "due: see needs_all for why, and give parameters that are not in this pool an optimizer of their own"
        )
    optimizer.step()


def _requires_closure(kind: type[Optimizer]) -> bool:
    _, *arguments = inspect.signature(kind.step).parameters.values()
    return any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)


def _is_replaced(optimizer: Optimizer) -> bool:
    """Return whether ``step`` was set on the optimizer itself by anything but an ``lr_scheduler``."""
    own = vars(optimizer).get("step")
    return own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step


def _copies(group: Mapping[str, Any]) -> _Settings:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    """Return a copy of a hyper-parameter: a learning rate, or betas, may be tensors that a schedule fills."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
