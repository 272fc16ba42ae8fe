"""Checks of what a training loop gives to a pool, with error messages that say what to give instead.

One is a record of which parameters are in a pool: a parameter that is trained but is in none would silently diverge
between ranks.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.kept_state import by_name
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology

_POOL_OF: Any = WeakIdKeyDictionary()
"""A weak reference to the pool of each parameter."""
_UPDATED_AT: Any = WeakKeyDictionary()
"""When a pool last updated each ``GradScaler``, as ``now`` counts."""
_MOMENTS = itertools.count(1)


def named_parameters(
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]], model: nn.Module | None
) -> tuple[nn.Module | None, dict[str, nn.Parameter], list[nn.Module]]:
    """Return the model without torch.compile's wrapper, the parameters by name, and the ``called_modules``.

    Args:
        parameters: A model, or its named parameters as pairs or as a dict.
        model: The model whose forward reads named parameters; None: not known.

    Raises:
        TypeError: The parameters have no names.
        ValueError: Two parameters have the same name.
    """
    if isinstance(parameters, DistributedDataParallel):
        raise ValueError("DistributedDataParallel averages gradients itself; give the pool, and call, the model in it")
    if isinstance(parameters, nn.Module):
        model = _uncompiled(parameters)
        return model, dict(model.named_parameters()), called_modules(parameters, model)
    given, model = model, None if model is None else _uncompiled(model)
    named: dict[str, nn.Parameter] = {}
    for item in parameters.items() if isinstance(parameters, dict) else parameters:
        if isinstance(item, Tensor) or not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(
                "these parameters have no names; give the pool the model itself, or, of some of its parameters, "
                "GradientPool(named, model=model), where named are pairs as of model.named_parameters()"
            )
        name, param = item
        if named.setdefault(name, param) is not param:
            raise ValueError(f"two parameters are named {name}; give each a name of its own")
    return model, named, [] if model is None else called_modules(given, model)


def refuse_ddp() -> None:
    """Raise RuntimeError inside a forward of torch's DDP, whose hooks would write to the pool's gradients."""
    if not torch.compiler.is_compiling() and DistributedDataParallel._get_active_ddp_module() is not None:
        raise RuntimeError(
            "DistributedDataParallel calls the model of this gradient pool and averages its gradients as well; call "
            "the model itself"
        )


def called_modules(given: object, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward may begin a step.

    They are the model; torch.compile's wrapper, if ``given`` is one; and the members of a list or a dict of modules,
    which has no forward itself.
    """
    modules = [model, given] if isinstance(given, nn.Module) and given is not model else [model]
    for module in modules:  # grows
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            modules += module.children()
    return modules


def refuse_engine_of_another(engine: SyncEngine, pool: object) -> None:
    """Raise an error if ``engine`` is none, or sends the gradients of another pool than ``pool``."""
    if not hasattr(engine, "gradient_ready"):
        raise TypeError(
            f"{engine!r} is no engine that is ready to send; give pool.attach what build_engine(settings, pool) returns"
        )
    if getattr(engine, "_pool", pool) is not pool:
        raise ValueError("this engine was built for another pool; build one with build_engine(settings, pool)")


def refuse_missing_group() -> None:
    """Raise ValueError if several ranks were started, and there is no process group."""
    started = os.environ.get("WORLD_SIZE", "")
    if not dist.is_initialized() and started not in ("", "0", "1"):
        raise ValueError(
            f"WORLD_SIZE is {started}, and each of these ranks would train for itself; call "
            "torch.distributed.init_process_group() before the pool is made, or unset WORLD_SIZE"
        )


def refuse_late_group(topology: Topology) -> None:
    """Raise RuntimeError if other ranks have come since ``topology`` was made without a process group."""
    if topology.alone and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this pool was made before the process group, so each of {dist.get_world_size()} ranks would train for "
            "itself; call init_process_group() first"
        )


def refuse_gradient(name: str, gradient: Tensor | None) -> None:
    """Raise RuntimeError if a pool cannot hold the gradient: it is gone, sparse or part of a graph."""
    if gradient is None:
        raise RuntimeError(
            f"a hook took the gradient of {name} away before it was averaged, as of an optimizer that steps in "
            "backward; step after it, by pool.step(optimizer)"
        )
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {name} is sparse, and a pool holds dense ones; take sparse=False for its nn.Embedding"
        )
    if gradient.requires_grad:
        raise RuntimeError(
            f"the gradient of {name} is part of a graph, as of backward(create_graph=True), and the mean over ranks "
            "would not be; take torch.autograd.grad(..., create_graph=True) for what is differentiated twice, and "
            "backward() for the loss that it becomes a part of"
        )


def refuse_replaced(slots: Sequence[ParamSlot], views: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a gradient was replaced since ``finish``: it would not be averaged."""
    for slot, view in zip(slots, views, strict=True):
        if slot.param.grad is not None and slot.param.grad is not view:
            raise RuntimeError(
                f"the gradient of {slot.name} was replaced since pool.finish(), and it is called again; begin each "
                "step with pool.zero_grad()"
            )


def refuse_late_drop(topology: Topology, found_inf: Tensor | None) -> None:
    """Raise RuntimeError if a step whose gradients are here is to be dropped, and other ranks apply it."""
    if topology.size > 1 and (found_inf is None or not found_inf):
        raise RuntimeError(
            "pool.zero_grad(drop=True) after pool.finish() cannot drop this step: the other ranks have its gradients "
            "and apply them; call pool.step(optimizer) on this rank too, or end the run"
        )


def refuse_early_save(engine: SyncEngine, finished: bool) -> None:
    """Raise RuntimeError if the state of ``engine`` is asked for while what it has sent is not applied yet."""
    if finished and engine.sends_part:
        raise RuntimeError(
            "pool.state_dict() between pool.finish() and pool.step() would lose this step's gradients; save after "
            "pool.step(optimizer), or after the next pool.zero_grad()"
        )


def refuse_state(state: object, ranks: int) -> None:
    """Raise ValueError if ``state`` is no value of a pool's ``state_dict``, or has a residual of other ``ranks``."""
    if not isinstance(state, dict) or not {"order", "engine"} <= state.keys():
        raise ValueError("this is no state of a pool; give it what pool.state_dict() was on this rank")
    theirs = state.get("ranks") or ranks
    if theirs != ranks and any(by_name(state["engine"]).get("kept", {}).values()):
        raise ValueError(
            f"this state has what one of {theirs} ranks did not send, and here are {ranks}; go on with {theirs}, or "
            "merge the states of all by imagenet_fast.sync.reshard_state.reshard_sync_state"
        )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, which names the parameters differently."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def register(pool: object, named: Mapping[str, nn.Parameter]) -> None:
    """Record that the parameters are in ``pool``.

    Raises:
        ValueError: A parameter is in another open pool. Nothing is recorded then.
    """
    for name, param in named.items():
        if is_pooled(param):
            raise ValueError(
                f"{name} is in another gradient pool; close() that one before this one is made or, if you no longer "
                "have it, train copy.deepcopy(model)"
            )
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
                if not param.requires_grad:
                    raise ValueError(
                        f"{kind}'s param_groups[{number}]['params'][{place}], of shape {tuple(param.shape)}, is frozen "
                        "and has an old gradient, which would be applied; set its .grad to None"
                    )
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

    def check(self, slots: Sequence[ParamSlot], in_pool: Mapping[nn.Parameter, ParamSlot]) -> None:
        """Check that the model's parameters are still those of the pool. Costs a loop over all parameters.

        Args:
            slots: The slots of the pool.
            in_pool: The same slots by parameter.

        Raises:
            RuntimeError: A module has another parameter than the one in the pool, or one with a gradient that is in no
                pool.
        """
        for slot in slots:
            if slot.module is not None and slot.module._parameters.get(slot.name.rpartition(".")[2]) is not slot.param:
                self._check_replaced(slot)
        for path, module in self._modules:
            _check_members(path, module, in_pool)
            for name, child in module._modules.items():
                if child is not None and child not in self._known:
                    for inner, new in child.named_modules(prefix=f"{path}.{name}" if path else name):
                        _check_members(inner, new, in_pool)

    def _check_replaced(self, slot: ParamSlot) -> None:
        """Raise RuntimeError if the module no longer has the parameter of ``slot``, under any name."""
        assert slot.module is not None
        if all(param is not slot.param for param in slot.module._parameters.values()):  # else it only has another name
            raise RuntimeError(
                f"{slot.name} is no longer the parameter that this gradient pool was made with, as after "
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


def refuse_second_step(optimizer: Optimizer, stepped: Sequence[Optimizer], scaled: bool, was_scaled: bool) -> None:
    """Refuse a step of ``optimizer`` that would apply gradients twice, or with a scale that is not theirs.

    Args:
        optimizer: The optimizer.
        stepped: The optimizers that have stepped since the last backward.
        scaled: Whether a ``GradScaler`` steps it.
        was_scaled: Whether a ``GradScaler`` has stepped one of those.

    Raises:
        RuntimeError: It has stepped already.
        ValueError: Another has stepped, and one of the two with a scaler.
    """
    if optimizer in stepped:
        raise RuntimeError(
            f"pool.step() was called twice with the same {type(optimizer).__name__}, and no backward between; "
            "begin each step with pool.zero_grad()"
        )
    if stepped and (scaled or was_scaled):
        raise ValueError(
            "pool.step(optimizer, scaler) updates the scaler, so a second optimizer would be unscaled by the next "
            "step's scale; call pool.finish(), scaler.step(...) for each optimizer and scaler.update() once"
        )


def refuse_unfit(engine: SyncEngine, optimizer: Optimizer, scaled: bool) -> None:
    """Raise ValueError if ``optimizer`` or a scaler does not go with what ``engine`` sends and keeps.

    Args:
        engine: The engine.
        optimizer: The optimizer.
        scaled: Whether a ``GradScaler`` steps it, by a loss scale that a residual of earlier steps does not have.
    """
    if engine.has_residual and scaled:
        raise ValueError(
            "this engine keeps what it does not send for later steps, whose loss scale is another: compute in bf16, "
            "which needs no GradScaler, or take an engine that sends everything, such as LazySync()"
        )
    if engine.sends_part and not hasattr(optimizer, "elements"):
        raise ValueError(
            "the engine sends a part of the gradients, and optimizers of torch would apply the rest as well: take "
            "another engine, or imagenet_fast's LARS or SGD"
        )
    if engine.adds_momentum and any(
        group.get("momentum", 1) and not group.get("corrected") for group in optimizer.param_groups
    ):
        raise ValueError(
            "momentum_correction adds momentum before gradients are averaged, and the optimizer would add it again; "
            "give imagenet_fast's SGD corrected=True, or turn momentum_correction off"
        )


def now() -> int:
    """Return the next of the moments that tell what came before what."""
    return next(_MOMENTS)


def note_update(scaler: torch.amp.GradScaler) -> None:
    """Note that a pool has updated ``scaler``, unless it is disabled, and so has no scale."""
    if scaler.is_enabled():
        _UPDATED_AT[scaler] = now()


def refuse_updated(scaler: torch.amp.GradScaler, since: int) -> None:
    """Raise ValueError if another pool has updated ``scaler`` after the moment ``since``, when a backward began."""
    if _UPDATED_AT.get(scaler, 0) > since:
        raise ValueError(
            "another pool has updated this scaler since the backward, whose scale is lost; call pool.finish() on each "
            "pool, scaler.step(...) for each optimizer and scaler.update() once"
        )
