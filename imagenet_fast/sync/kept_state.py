"""What an engine keeps from step to step of what was not sent: tensors by parameter name and kind.

The kinds are ``residual`` (8-bit wires, ``sparse``) and ``velocity`` (``sparse``), flat as they lie in memory, and
``error`` and ``q`` (``powersgd``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.distributed.reductions import RunningMeans
from imagenet_fast.sync.param_slot import ParamSlot

Kept = dict[str, dict[str, Tensor]]
"""The tensors by parameter name, in pool order, and kind."""


def cut(slots: Iterable[ParamSlot], **flat: Tensor) -> Kept:
    """Return the parts of 1-D tensors that are laid out as ``slots``, by parameter name; they share their memory."""
    return {slot.name: {kind: values[slot.start : slot.flag] for kind, values in flat.items()} for slot in slots}


def lay(kept: Kept, kind: str, slots: Iterable[ParamSlot], into: Tensor) -> None:
    """Copy what is kept of a kind into a 1-D tensor that is laid out as ``slots``, except where the size is another."""
    for slot in slots:
        values = kept.get(slot.name, {}).get(kind)
        if values is not None and values.shape == (slot.shape.numel(),):
            into[slot.start : slot.flag] = values


def copied(kept: Kept, device: torch.device) -> Kept:
    """Return a copy on ``device``."""
    return {name: {kind: values.to(device, copy=True) for kind, values in own.items()} for name, own in kept.items()}


def reshard_sync_state(states: Iterable[Any], sharded: bool = False) -> dict[str, Any]:
    """Merge the synchroniser states of all ranks into one that each of a different set of ranks can resume from.

    Each new rank gets, per parameter, the mean of the ranks' residuals. So the mean over the new ranks, to which these
    values are added, gets all that it was to get. Plans and measurements are dropped, because they belong to other
    ranks.

    Args:
        states: The ``state_dict`` of every rank's synchroniser; a list where a rank has several pools. Two are held
            at a time at most.
        sharded: Whether each rank's first pool holds shards of layers. Shards are not put together, so their residual
            is lost.
    """
    means: dict[str, RunningMeans] = {}
    steps: list[int] = []
    elected: set[str] = set()
    for state in states:
        for pool in state[sharded:] if isinstance(state, list) else [state]:
            engine = pool["engine"]
            elected.add(engine.get("elected", ""))
            if "step" in engine:
                steps.append(engine["step"])
                for name, own in engine["kept"].items():
                    for kind, values in own.items():
                        means.setdefault(name, RunningMeans()).add(kind, values)
    merged: dict[str, Any] = {}
    if steps:
        kept = {name: of_one.values for name, of_one in means.items()}
        merged = {"step": max(steps), "kept": kept, "learnt": None, "chunks": None}
    if len(elected) == 1 and (chosen := elected.pop()):
        merged["elected"] = chosen
    return {"order": None, "engine": merged}
