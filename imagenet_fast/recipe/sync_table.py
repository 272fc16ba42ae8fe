"""The keys that engines' ``[sync]`` tables share, and the properties that other modules query.

No other module needs to know which engine it is, except the ``match`` that declares it
(``cost_model/declarations.py``) and the code that builds it (``sync/factory.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Self, get_args

from pydantic import PositiveInt

from imagenet_fast.recipe.base import Bytes, Table

Cast = Literal["fp32", "bf16", "fp16"]
"""Wire dtypes to which values are cast."""
Codes = Literal["int8"]
"""The wire dtype of 8-bit codes."""
Wire = Literal[Cast, Codes]
"""The wire dtype: the dtype in which values are sent.

``int8`` values are codes with one scale per 512 of them. Their rounding error is added to a later step's gradients.
With them, norms and biases are sent in bf16, and so is everything sent inside a node if there are several equal nodes
of several ranks.
"""
Collective = Literal["native", "ring", "butterfly", "pairwise", "hierarchical", "parameter_server"]
"""All-reduce algorithm.

``native`` is the backend's own. ``hierarchical`` works node by node.
"""
Awaits = Literal["each", "backward", "read"]
"""The point at which a step waits for its transfers.

- ``each``: after each all-reduce, before the next.
- ``backward``: at the end of backward.
- ``read``: before the next forward reads a layer.
"""

Fusion = Bytes | Literal["auto"]
"""Size in MiB on the wire at which neighbouring gradients, fused into one bucket, are sent.

0: each tensor by itself. ``inf``: no limit. ``auto``: the best size by the cost model for this network and model, both
measured in the first steps; ``sparse`` has its own rule.
"""


def fusion_bytes(fusion: Fusion) -> float | None:
    """Return the size in bytes, or None if it is to be chosen."""
    return None if fusion == "auto" else fusion * 2**20


def chosen_collective(collective: Collective | Literal["auto"]) -> Collective | None:
    """Return the collective, or None for the default one."""
    return None if collective == "auto" else collective


class SyncTable(Table):
    """The ``[sync]`` table of an engine.

    The defaults here hold for every engine that does not override them.
    """

    kind: str
    """Name of the engine."""
    wire: Wire
    """Wire dtype of the gradients."""

    ours: ClassVar[bool] = True
    """Whether the engine works on a gradient pool; torch's DDP, the baseline, does not."""
    unreplayable: ClassVar[str] = ""
    """Why no CUDA graph can hold its steps, as the end of a sentence about it; empty if one can."""
    chooses: ClassVar[bool] = False
    """Whether it predicts the step time of the other engines, and switches to the fastest."""
    telling: ClassVar[tuple[str, ...]] = ()
    """Keys that error messages name beside the engine, each if it is on."""

    @property
    def keeps(self) -> bool:
        """Whether values that a step does not send are added to later steps. If not, means are exact up to rounding."""
        return self.wire in get_args(Codes)

    @property
    def awaits(self) -> Awaits:
        """The point at which a step waits for its transfers."""
        return "backward"

    @property
    def defers(self) -> bool:
        """Whether a layer may be updated before the gradients of all other layers have arrived."""
        return self.awaits == "read"

    @property
    def velocity_momentum(self) -> float | None:
        """Momentum that the averaged gradients already contain, so that the optimizer adds none; None: none."""
        return None

    @property
    def share(self) -> float:
        """Share of the values that it sends after its ramp."""
        return 1.0

    def values_sent(self, shape: Sequence[int]) -> float:
        """Return how many values it sends for a parameter of ``shape`` after its ramp."""
        return self.share * math.prod(shape)

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        coded = f" in sync.wire '{self.wire}'" if self.wire in get_args(Codes) else ""
        on = [f"sync.{key} {value!r}".lower() for key in self.telling if (value := getattr(self, key))]
        return f"sync.kind '{self.kind}'{coded}{' with ' if on else ''}{' and '.join(on)}"

    def derived(self, **values: float) -> Self:
        """Return the settings with those of ``values`` that they have a key for, and have left unset."""
        unset = {key: value for key, value in values.items() if getattr(self, key, value) is None}
        return self.model_copy(update=unset) if unset else self


class PoolTable(SyncTable):
    """Settings of an engine that works on a gradient pool."""

    max_ctas: PositiveInt | None = None
    """Most thread blocks that NCCL may use per message; absent: NCCL decides.

    Fewer leave more of a GPU to backward while gradients are sent.
    """


class CodingTable(PoolTable):
    """Settings of an engine that can send gradients as 8-bit codes."""

    wire: Wire = "bf16"
    """Wire dtype of the gradients."""
