"""Refuse what a training loop may not do with a pool, and say what to do instead; nothing else refuses.

One check is a record of which parameters are in a pool: a parameter that is trained but is in none would silently
diverge between ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.recipe.sync_config import DdpSync
from imagenet_fast.recipe.sync_table import SyncTable
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.param_slot import ParamSlot, label_of
from imagenet_fast.sync.topology import Topology

pools: WeakSet[Any] = WeakSet()
"""The pools of this process."""


class StepState(IntEnum):
    """How far a step has come."""

    __hash__ = int.__hash__  # Enum's takes a microsecond

    OPEN = 0
    """No gradient of it has been sent; this rank may have accumulated some."""
    SENDING = 1
    """Backward has begun to send gradients."""
    SENT = 2
    """All gradients have been sent, and may still be in flight."""
    MEANS = 3
    """``p.grad`` holds the means, which the user may change."""
    DONE = 4
    """The means were applied, will be, or were dropped; or the update has failed."""
    CLOSED = 5
    """The pool was closed, and begins no other step."""
    FORKED = 6
    """The pool is another process's, of which this one is a fork."""


_ON_THEIR_WAY = (
    "gradients of this step are on their way to the other ranks; end it by pool.step(optimizer) or, where every rank "
    "gives it up, as after an exception, by pool.drop()"
)
_OVER = "this step is over; begin each step with pool.zero_grad(), and give pool.step() every optimizer in one call"
_BACKWARD = (
    "a backward reached the pool after its gradients were synchronised; begin each step with pool.zero_grad(), and "
    "wrap a loss of another network that passes through this one in pool.no_sync()"
)

_REFUSED: dict[str, dict[StepState, str]] = {
    "zero_grad": {StepState.SENDING: _ON_THEIR_WAY, StepState.SENT: _ON_THEIR_WAY},
    "backward": {StepState.SENT: _BACKWARD, StepState.MEANS: _BACKWARD, StepState.DONE: _BACKWARD},
    "finish": {StepState.DONE: _OVER},
    "step": {StepState.DONE: _OVER},
    "drop": {
        StepState.SENT: "all ranks have sent this step's gradients, so it cannot be dropped; end it by pool.step()",
        StepState.MEANS: "after pool.finish() no step need be dropped; call pool.zero_grad() on every rank instead",
        StepState.DONE: "this step is over, and cannot be dropped; call pool.drop() before pool.step(), once",
    },
    "state_dict": {StepState.SENDING: _ON_THEIR_WAY, StepState.SENT: _ON_THEIR_WAY},
    "load_state_dict": {StepState.SENDING: _ON_THEIR_WAY, StepState.SENT: _ON_THEIR_WAY},
}
"""Why each call of a loop is refused, by the state of the step; in all others it is allowed."""
_REFUSED_FOR_GOOD = {
    StepState.CLOSED: "this pool is closed; make a new one to train on, and save a pool's state before you close it",
    StepState.FORKED: (
        "this process was forked from the one with the pool's connections; train there, and only read the model here"
    ),
}

_REFUSED_OF_GRADIENT = {
    "unseen read": (
        "the gradient of {} is of the values before its last update; make each forward after pool.step(), and call "
        "pool.settle() before one that calls no torch function with a parameter, as in torch.func"
    ),
    "sparse": "the gradient of {} is sparse, and a pool holds dense ones; take sparse=False for its nn.Embedding",
    "part of a graph": (
        "the gradient of {} is part of a graph, as of create_graph=True, and the mean over ranks would not be; take "
        "torch.autograd.grad(..., create_graph=True) for what is differentiated twice, backward() for the loss that it "
        "becomes a part of, and detach() what is set by hand"
    ),
    "taken away": (
        "a hook took the gradient of {} away before it was averaged, as of an optimizer that steps in backward; step "
        "after it, by pool.step(optimizer)"
    ),
    "second backward": (
        "a second backward reached {} in one step, after its gradient had left; wrap all but the last in "
        "pool.no_sync(), begin steps with pool.zero_grad(), checkpoint without use_reentrant"
    ),
    "change": (
        "the gradient of {} was replaced while it was on its way to the other ranks; call pool.finish() after "
        "backward, before gradients are changed"
    ),
}
_STRAY = (
    "is to be trained but is in no gradient pool, so every rank would train it for itself; make the pool of all that "
    "trains, after the last change of parameters, or freeze it by requires_grad_(False)"
)


def check(state: StepState, call: str) -> None:
    """Raise RuntimeError if ``call`` is not allowed in a step that has come so far."""
    if why := _REFUSED_FOR_GOOD.get(state) or _REFUSED.get(call, {}).get(state):
        raise RuntimeError(why)


def refuse(why: str, slot: ParamSlot) -> NoReturn:
    """Raise RuntimeError, because what backward went through, or a gradient in flight, was not as it must be."""
    raise RuntimeError(_REFUSED_OF_GRADIENT[why].format(slot.name))


def named_parameters(
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]], model: nn.Module | None
) -> tuple[nn.Module | None, nn.Module | None, dict[str, nn.Parameter]]:
    """Return the model without torch.compile's wrapper, the model as it is called, and the parameters by name.

    Args:
        parameters: A model, or its named parameters as pairs or as a dict.
        model: The model whose forward reads named parameters; None: not known.

    Raises:
        TypeError: The parameters have no names.
        ValueError: Two parameters have the same name; or torch's DDP averages them.
    """
    if isinstance(parameters, DistributedDataParallel):
        raise ValueError("DistributedDataParallel averages gradients itself; give the pool, and call, the model in it")
    if isinstance(parameters, nn.Module):
        model = _uncompiled(parameters)
        return model, parameters, dict(model.named_parameters())
    named: dict[str, nn.Parameter] = {}
    for item in parameters.items() if isinstance(parameters, dict) else parameters:
        if isinstance(item, Tensor) or not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(
                "these parameters have no names; give the pool the model itself, or, of some of its parameters, "
                "GradientPool(named, engine, model=model), where named are pairs as of model.named_parameters()"
            )
        name, param = item
        if named.setdefault(name, param) is not param:
            raise ValueError(f"two parameters are named {name}; give each a name of its own")
    return None if model is None else _uncompiled(model), model, named


def trainable(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that train, after a check that a pool can hold them.

    Raises:
        ValueError: None trains; or they differ in dtype or device, are complex, have gradients of another dtype, are
            shards, or are in another open pool.
    """
    chosen = {name: param for name, param in named.items() if param.requires_grad}
    if not chosen:
        raise ValueError("the model has no trainable parameter")
    first = next(iter(reversed(chosen.values())))
    for name, param in reversed(chosen.items()):
        if param.layout is not torch.strided:
            raise ValueError(f"{name} is sparse, and a pool holds dense parameters; make it one by to_dense()")
        if hasattr(param, "placements"):
            raise ValueError(
                f"{name} is a DTensor, as fully_shard makes them, whose gradients torch averages itself; give the pool "
                "a model of whole parameters"
            )
        if getattr(param, "grad_dtype", None) not in (None, param.dtype):
            raise ValueError(
                f"{name} is of {param.dtype} and its grad_dtype {param.grad_dtype}; leave that out, an engine's wire "
                "is the dtype that is sent"
            )
        if (param.dtype, param.device) != (first.dtype, first.device):
            raise ValueError(
                f"parameters of one pool share a dtype and a device, and {name} is of {param.dtype} on {param.device} "
                f"beside {first.dtype} on {first.device}; make a pool of each kind, by "
                "GradientPool(named, engine, model=model)"
            )
        if is_pooled(param):
            raise ValueError(
                f"{name} is in another gradient pool; close() that one before this one is made or, if you no longer "
                "have it, train copy.deepcopy(model)"
            )
    if not first.dtype.is_floating_point:
        raise ValueError(
            f"a pool cannot hold {first.dtype}, which would travel without its imaginary part; make parameters of "
            "torch.view_as_real's kind, and take torch.view_as_complex of them in forward"
        )
    return chosen


def check_engine(engine: object) -> None:
    """Raise TypeError if ``engine`` is not the settings of one, a declaration, or a function that builds one."""
    built = callable(engine) and not isinstance(engine, type)
    if isinstance(engine, DdpSync) or not (built or isinstance(engine, SyncTable | Declaration)):
        raise TypeError(f"{engine!r} is no engine for a pool; give the settings of one, such as LazySync()")


def refuse_ddp(_: nn.Module) -> None:
    """Raise RuntimeError if torch's DDP calls a pool's model: its hooks would write to the pool's gradients."""
    if DistributedDataParallel._get_active_ddp_module() is not None:
        raise RuntimeError(
            "DistributedDataParallel calls the model of this gradient pool and averages its gradients as well; call "
            "the model itself"
        )


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


def refuse_compiled_autograd() -> None:
    """Raise RuntimeError in a backward that is compiled, and hooks and gradients in flight with it."""
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
        raise RuntimeError(
            "a pool sends gradients by hooks, which compiled autograd would compile; call backward outside of its "
            "context, and set torch._dynamo.config.compiled_autograd = False"
        )


def check_gradient(slot: ParamSlot, gradient: Tensor | None, values: Tensor) -> None:
    """Check that ``values``, the pool's buffer, can hold a gradient of backward, or one set by hand, if there is one.

    Raises:
        RuntimeError: It is sparse or part of a graph, or the parameter was converted.
    """
    param = slot.param
    now = param if gradient is None else gradient
    if now.layout is not torch.strided:
        refuse("sparse", slot)
    if gradient is not None and gradient.requires_grad:
        refuse("part of a graph", slot)
    layout = param.shape, param.stride()
    if layout != slot.layout or now.dtype != values.dtype or now.device != values.device:
        raise RuntimeError(
            f"{slot.name} was converted after its gradient pool was made: from {values.dtype} on {values.device} with "
            f"size and strides {slot.layout} to {param.dtype} on {param.device} with {layout}; close() the pool first, "
            "and make a new one after that"
        )


def refuse_failed(failed: dict[ParamSlot, int]) -> None:
    """Raise RuntimeError if an update failed halfway, at these versions of the parameters, and one is still of it.

    A loop that goes on has lost a part of the update, unless all were written to since, as by a checkpoint.
    """
    if any(slot.param._version == version for slot, version in failed.items()):
        raise RuntimeError(
            f"an update of {label_of([*failed])} failed halfway, and its weights are of no step; go on from a "
            "checkpoint"
        )


def check_save(state: StepState, engine: SyncEngine) -> None:
    """Raise RuntimeError if the state of ``engine`` is asked for while what it has sent is not applied yet."""
    check(state, "state_dict")
    if state is StepState.MEANS and engine.sends_part:
        raise RuntimeError(
            "pool.state_dict() between pool.finish() and pool.step() would lose this step's gradients; save after "
            "pool.step(optimizer), or after the next pool.zero_grad()"
        )


def check_state(state: object, ranks: int) -> None:
    """Raise ValueError if ``state`` is no value of a pool's ``state_dict``, or has a residual of other ``ranks``."""
    if not isinstance(state, dict) or not {"order", "engine"} <= state.keys():
        raise ValueError("this is no state of a pool; give it what pool.state_dict() was on this rank")
    theirs = state.get("ranks") or ranks
    if theirs != ranks and any(state["engine"].get("kept", {}).values()):
        raise ValueError(
            f"this state has what one of {theirs} ranks did not send, and here are {ranks}; go on with {theirs}, or "
            "merge the states of all by imagenet_fast.sync.kept_state.reshard_sync_state"
        )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, which names the parameters differently."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_pooled(param: nn.Parameter) -> bool:
    """Return whether a parameter is in an open pool."""
    return any(pool.is_open and param in pool.gradients.slot_of for pool in pools)


def check_optimizer(optimizer: Optimizer, in_pool: Mapping[nn.Parameter, ParamSlot]) -> bool:
    """Check that ``optimizer`` updates parameters of this pool, and none that is in no pool.

    Returns:
        Whether all of its parameters are in this pool.

    Raises:
        ValueError: The optimizer has no parameter of this pool, or one with a gradient that is in no pool.
    """
    kind = type(optimizer).__name__
    here: list[bool] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            here.append(param in in_pool)
            if not here[-1] and param.grad is not None and not is_pooled(param):
                named = f"{kind}'s param_groups[{number}]['params'][{place}], of shape {tuple(param.shape)},"
                if not param.requires_grad:
                    raise ValueError(
                        f"{named} is frozen and has an old gradient, which would be applied; set its .grad to None"
                    )
                raise ValueError(f"{named} {_STRAY}")
    if not any(here):
        raise ValueError(
            f"{kind} has none of this pool's parameters, so the step would change nothing; give it the model's "
            "parameters as they are now, or, where it has copies of them, call pool.finish(), copy the gradients and "
            "call optimizer.step()"
        )
    return all(here)


def check_strays(model: nn.Module, in_pool: Container[nn.Parameter]) -> None:
    """Raise RuntimeError if a parameter of ``model`` wants a gradient and is in no pool, as after it was unfrozen."""

    def visit(module: nn.Module) -> None:
        for param in module._parameters.values():
            if param is not None and param not in in_pool and param.requires_grad and not is_pooled(param):
                name = next(name for name, other in _uncompiled(model).named_parameters() if other is param)
                raise RuntimeError(f"{name} {_STRAY}")
        for child in module._modules.values():
            if child is not None:
                visit(child)

    visit(model)  # takes a fourth of the time of named_parameters()


def check_optimizers(optimizers: Sequence[Optimizer], engine: SyncEngine) -> None:
    """Check that the optimizers of a step apply what ``engine`` sends, and no more.

    Raises:
        ValueError: There is none; one is given twice; or one would apply elements that were not sent, or momentum that
            is in the gradients already.
    """
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        raise ValueError("pool.step() takes every optimizer of the step, each once: pool.step(optimizer, another)")
    if engine.sends_part and not all(hasattr(optimizer, "elements") for optimizer in optimizers):
        raise ValueError(
            "the engine sends a part of the gradients, and optimizers of torch would apply the rest as well: take "
            "another engine, or imagenet_fast's LARS or SGD"
        )
    if engine.adds_momentum and any(
        group.get("momentum", 1) and not group.get("corrected")
        for optimizer in optimizers
        for group in optimizer.param_groups
    ):
        raise ValueError(
            "momentum_correction adds momentum before gradients are averaged, and the optimizer would add it again; "
            "give imagenet_fast's SGD corrected=True, or turn momentum_correction off"
        )
