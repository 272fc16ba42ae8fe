"""Checks of what a training loop gives to a pool, with error messages that say what to give instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_fast.sync.engine import SyncEngine


def named_parameters(
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]], model: nn.Module | None
) -> tuple[nn.Module | None, dict[str, nn.Parameter]]:
    """Return the model without torch.compile's wrapper, and the parameters by name.

    Args:
        parameters: A model, or its named parameters as pairs or as a dict.
        model: The model whose forward reads named parameters; None: not known.

    Raises:
        TypeError: The parameters have no names.
        ValueError: Two parameters have the same name.
    """
    if isinstance(parameters, nn.Module):
        model = _uncompiled(parameters)
        return model, dict(model.named_parameters())
    if model is not None:
        model = _uncompiled(model)
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
    return model, named


def refuse_gradient(name: str, gradient: Tensor) -> None:
    """Raise RuntimeError if a pool cannot hold the gradient: it is sparse or part of a graph."""
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


def refuse_state(state: object) -> None:
    """Raise ValueError if ``state`` is not a value of a pool's ``state_dict``."""
    if not isinstance(state, dict) or not {"order", "elected", "engine"} <= state.keys():
        raise ValueError("this is no state of a pool; give it what pool.state_dict() was on this rank")


def refuse_choice(engine: SyncEngine, elected: str) -> None:
    """Raise ValueError if ``engine`` cannot hand the pool to the candidate ``elected``."""
    if elected in engine.candidates:
        return
    if engine.candidates:
        raise ValueError(
            f"this state is of the time after auto had chosen {elected}, which is not among what it may choose here; "
            "give auto the settings that it had"
        )
    if engine.elected:
        raise ValueError(
            f"this state is of the time after auto had chosen {elected}, and here it has chosen {engine.elected}; load "
            "the state before the pool's first step"
        )
    raise ValueError(
        f"this state is of the time after auto had chosen {elected}, and here another engine is attached; attach auto"
    )


def refuse_engine_state(engine: SyncEngine, state: dict[str, Any]) -> None:
    """Raise ValueError if ``engine`` cannot resume from ``state``, because it is another engine's."""
    if not engine.state_keys <= state.keys() and (state or engine.needs_state):
        raise ValueError(
            f"this state is of another engine than {type(engine).__name__.lower()}; attach that engine, with the same "
            "settings, or begin without its state"
        )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, which names the parameters differently."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model
