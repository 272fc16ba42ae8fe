"""What many programs are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sync.fuzz_models import LAYERS, model
from tests.sync.fuzz_programs import SGD, Backward, Op, Optimizer, Skipped, Step, ZeroGrad

ODDLY = replace(LAYERS, registered=(3, 0, 4, 1, 2))
"""Registered in another order than they are read in, so that in the first step nothing may have left early."""
WITH_ALL = model("embedding", "reader in eval", "tied", "attention", "scalar", "lora", "linear", tied=True)
"""A tied head, a block that reads its child's weights, and one that merges an adapter in ``eval``."""
ADAMW = Optimizer("adamw", (("lr", 0.005), ("weight_decay", 0.1)))
LARS = replace(SGD, kind="our lars")
TWO = (SGD, ADAMW)


def step(*ops: Op, **how: Any) -> tuple[Op, ...]:
    """What happens between ``zero_grad`` and the update, and how that is made."""
    return (ZeroGrad(), *ops, Step(**how))


STEP = step(Backward())


def skipping(*by_rank: tuple[int, ...]) -> Skipped:
    """The blocks that each rank's forward leaves out."""
    return tuple(map(frozenset, by_rank))
