"""Convert the synchroniser states of some ranks for others, of any number and any division of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.sync.param_slot import Places

_KEPT = ("left", "residual", "velocity")
"""Entries of one rank's state that are laid out by pool offset."""


def reshard_sync_state(states: Iterable[Any], sharded: bool = False) -> dict[str, Any]:
    """Merge the synchroniser states of all ranks into one that each of a different set of ranks can resume from.

    Each new rank gets, per parameter, the mean of the ranks' residuals. So the mean over the new ranks, to which these
    values are added, gets all that it was to get. Plans and measurements are dropped, because they belong to other
    ranks.

    Args:
        states: The ``state_dict`` of every rank's synchroniser; a list where a rank has several pools.
        sharded: Whether each rank's first pool holds shards of layers. Shards are not put together, so their residual
            is lost.
    """
    pools = [
        pool for state in states for pool in (state[sharded:] if isinstance(state, list) else [state]) if pool
    ]  # fmt: skip
    engines = [pool["engine"] for pool in pools if pool["engine"]]
    merged: dict[str, Any] = {}
    if engines:
        merged = {"step": max(engine["step"] for engine in engines), "learnt": None}
        merged |= _kept(engines)
        merged["memory"] = _memory([engine.get("memory", {}) for engine in engines])
    elected = {pool["elected"] for pool in pools}
    return {
        "order": None, "elected": elected.pop() if len(elected) == 1 else "", "engine": merged,
        "loss_scale": next((scale for pool in pools if (scale := pool.get("loss_scale")) is not None), None),
    }  # fmt: skip


def _kept(engines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means by parameter, concatenated, and their places."""
    found: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in _KEPT}
    for engine in engines:
        for kind in _KEPT:
            values = engine.get(kind)
            if values is not None and values.numel():
                for name, (start, flag) in engine["places"].items():
                    found[kind].setdefault(name, []).append(values[start : flag + 1])
    names = {name: parts for by_name in found.values() for name, parts in by_name.items()}
    places: Places = {}
    begin = 0
    for name, parts in names.items():
        places[name] = (begin, begin + len(parts[0]) - 1)
        begin += len(parts[0])
    kept: dict[str, Any] = {"places": places}
    for kind, by_name in found.items():
        kept[kind] = torch.cat([_mean(by_name[name]) for name in names]) if by_name else None
    return kept


def _memory(memories: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Merge the compressors' memories: errors differ between ranks and are averaged, the rest is equal on all."""
    merged: dict[str, dict[str, Tensor]] = {}
    for name in dict.fromkeys(name for memory in memories for name in memory):
        own = [memory[name] for memory in memories if name in memory]
        merged[name] = own[0] | {"error": _mean([kept["error"] for kept in own])}
    return merged


def _mean(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total / len(parts)
