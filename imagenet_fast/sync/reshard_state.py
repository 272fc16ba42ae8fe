"""Convert the synchroniser states of some ranks for others, of any number and any division of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.sync.kept_state import by_name


class RunningMeans:
    """Means of tensors by name, to which one rank after another adds its own."""

    def __init__(self) -> None:
        """Start without tensors."""
        self._means: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()

    def add(self, name: str, value: Tensor) -> None:
        """Add one rank's tensor of this name."""
        self._counts[name] += 1
        if (mean := self._means.get(name)) is None:
            self._means[name] = value.clone()
        elif value.is_floating_point() or value.is_complex():
            nearer = mean + (value - mean) / self._counts[name]
            self._means[name] = torch.where(mean == value, mean, nearer)  # equal values stay so, infinities too
        else:
            torch.maximum(mean, value, out=mean)

    def all(self) -> dict[str, Tensor]:
        """Return the means, or the maxima of integers such as batch counts."""
        return dict(self._means)


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
            if not pool:
                continue
            engine = by_name(pool["engine"])
            elected.add(pool.get("elected") or engine.get("elected", ""))  # beside the engine's in earlier versions
            if "step" in engine:
                steps.append(engine["step"])
                for name, own in engine["kept"].items():
                    for kind, values in own.items():
                        means.setdefault(name, RunningMeans()).add(kind, values)
    merged: dict[str, Any] = {}
    if steps:
        kept = {name: of_one.all() for name, of_one in means.items()}
        merged = {"step": max(steps), "kept": kept, "learnt": None, "chunks": None}
    if len(elected) == 1 and (chosen := elected.pop()):
        merged["elected"] = chosen
    return {"order": None, "engine": merged}
