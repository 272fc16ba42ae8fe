"""What an engine keeps from step to step of what was not sent: tensors by parameter name and kind.

The kinds are ``residual`` (8-bit wires, ``sparse``) and ``velocity`` (``sparse``), flat as they lie in memory, and
``error`` and ``q`` (``powersgd``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
        if values is not None and values.shape == (slot.param.numel(),):
            into[slot.start : slot.flag] = values


def copied(kept: Kept, device: torch.device) -> Kept:
    """Return a copy on ``device``."""
    return {name: {kind: values.to(device, copy=True) for kind, values in own.items()} for name, own in kept.items()}


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's state in this form, also if an earlier version saved it, by places in the pool."""
    if (places := state.get("places")) is None:
        return state
    kept: Kept = {name: dict(state.get("memory", {}).get(name, {})) for name in places}
    for kind, earlier in (("residual", "left"), ("residual", "residual"), ("velocity", "velocity")):
        values = state.get(earlier)
        if values is not None and values.numel():
            for name, (start, flag) in places.items():
                kept[name][kind] = values[start:flag]
    today = {key: state[key] for key in ("step", "learnt", "elected") if key in state} | {"kept": kept}
    if "residual" in state:
        today["chunks"] = None
        if "scores" in state:
            starts = [start for start, _ in places.values()]
            today["chunks"] = {"scores": state["scores"], "ages": state["ages"], "starts": starts}
    return today
