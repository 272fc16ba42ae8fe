"""What synchronisers kept on some ranks, for others: as many or not, and whatever each of them trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.sync.param_slot import Places

_KEPT = ("left", "residual", "velocity")
"""By pool offset, of one rank."""


def reshard_sync_state(states: Iterable[Any], sharded: bool = False) -> dict[str, Any]:
    """From the :meth:`state_dict` of every rank's synchroniser one that each of other ranks can continue from.

    Each gets the mean of what ranks had left behind of a parameter, so the mean over ranks, of which these values will
    be a part, gets all that it was to get. Shards of layers, which are the first pool of each rank where there are any
    (``sharded``), are not put together: what was left of them is lost. So are plans and measurements, which were of
    other ranks.
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
    """Means by parameter, one behind the other, and their places."""
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
    """A compressor's: errors are of one rank, the rest all have alike."""
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
