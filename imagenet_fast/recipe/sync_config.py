"""The gradient-sync engines a recipe can name: their settings, and the properties that other modules query.

No other module needs to know which engine it is, except the ``match`` that builds it (``sync/__init__.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from imagenet_fast.recipe.base import Fraction, Table

Cast = Literal["fp32", "bf16", "fp16"]
"""Wire dtypes to which values are cast."""
Codes = Literal["int8", "fp8"]
"""Wire dtypes that are 8-bit codes."""
Wire = Literal[Cast, Codes]
"""The wire dtype: the dtype in which values are sent.

``int8`` and ``fp8`` (e4m3) are codes with one scale per 512 values. Their rounding error is added to a later step's
gradients. With them, norms and biases are sent in bf16, and so is everything sent inside a node.
"""
Collective = Literal["native", "ring", "butterfly", "pairwise", "hierarchical", "torus2d", "parameter_server"]
"""All-reduce algorithm.

``native`` is the backend's own. ``hierarchical`` works node by node, ``torus2d`` on a square of ranks.
"""
Awaits = Literal["each", "backward", "read"]
"""The point at which a step waits for its transfers; see ``EngineTable.awaits``."""


def _infinity(value: object) -> object:
    """Turn "Infinity" into a float: JSON has no infinity, so a job file stores that string."""
    return math.inf if value == "Infinity" else value


Bytes = Annotated[float, Field(ge=0, allow_inf_nan=True), BeforeValidator(_infinity)]
"""MiB on the wire, at least 0; ``inf``: no limit."""
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


class EngineTable(Table):
    """The ``[sync]`` table of an engine.

    The defaults here hold for every engine that does not override them.
    """

    kind: str
    """Name of the engine."""
    wire: Wire
    """Wire dtype of the gradients."""

    ours: ClassVar[bool] = True
    """Whether the engine works on a gradient pool; torch's DDP, the baseline, does not."""
    chooses: ClassVar[bool] = False
    """Whether it predicts the step time of the other engines, and switches to the fastest."""

    @property
    def keeps(self) -> bool:
        """Whether values that are not sent in a step are added up for later steps."""
        return self.wire in get_args(Codes)

    @property
    def awaits(self) -> Awaits:
        """The point at which a step waits for its transfers.

        - ``each``: after each all-reduce, before the next.
        - ``backward``: at the end of backward.
        - ``read``: before the next forward reads a layer.
        """
        return "backward"

    @property
    def defers(self) -> bool:
        """Whether a layer may be updated before the gradients of all other layers have arrived."""
        return self.awaits == "read"

    @property
    def exact(self) -> bool:
        """Whether every step's gradients are the mean over ranks, except for rounding to the wire dtype."""
        return not self.keeps

    @property
    def brings_momentum(self) -> bool:
        """Whether the averaged gradients already contain the optimiser's momentum."""
        return False

    @property
    def learns(self) -> bool:
        """Whether it measures a few steps before it plans the others."""
        return False

    @property
    def share(self) -> float:
        """Share of the values that it sends after its ramp."""
        return 1.0

    def travelling(self, shape: Sequence[int]) -> float:
        """Return how many values it sends for a parameter of ``shape`` after its ramp."""
        return self.share * math.prod(shape)

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        return f"sync.kind '{self.kind}'"

    def warmed_up(self, epochs: float) -> Self:
        """Return the settings with unset ones derived from a learning-rate warm-up of ``epochs`` epochs."""
        return self

    def moved_by(self, momentum: float) -> Self:
        """Return the settings with unset ones derived from the optimiser's momentum."""
        return self


class PoolTable(EngineTable):
    """Settings of an engine that works on a gradient pool."""

    max_ctas: PositiveInt | None = None
    """Most thread blocks that NCCL may use per message; absent: NCCL decides.

    Fewer leave more of a GPU to backward while gradients are sent.
    """


class CodingTable(PoolTable):
    """Settings of an engine that can send gradients as 8-bit codes."""

    bf16_steps: NonNegativeInt = 0
    """First steps whose gradients are sent in bf16 if ``wire`` is int8 or fp8; 0: none."""

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        return super().as_written + (f" in sync.wire '{self.wire}'" if self.wire in get_args(Codes) else "")


class AllReduceSync(CodingTable):
    """One all-reduce per layer after backward: the naive baseline."""

    awaits: ClassVar[Awaits] = "each"

    kind: Literal["allreduce"] = "allreduce"
    wire: Wire = "fp32"
    collective: Collective = "native"
    """All-reduce algorithm."""
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded; used with ``collective`` = ``parameter_server``."""


class RingSync(CodingTable):
    """A ring all-reduce per bucket of ``bucket_mb``, overlapped with backward."""

    kind: Literal["ring"] = "ring"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"
    """Bucket size in MiB on the wire, or ``auto``."""

    @property
    def learns(self) -> bool:
        """Whether it measures the first steps before it plans later ones: if ``bucket_mb`` is ``auto``."""
        return self.bucket_mb == "auto"


class LazySync(CodingTable):
    """All-reduces of gradients fused in the pool until ``threshold_mb``, overlapped with backward.

    After GradientFlow (arXiv 1902.06855).
    """

    kind: Literal["lazy"] = "lazy"
    wire: Wire = "bf16"
    threshold_mb: Fusion = "auto"
    """Size in MiB on the wire at which neighbouring gradients are sent, or ``auto``."""
    collective: Collective | Literal["auto"] = "auto"
    """All-reduce algorithm.

    ``auto``: hierarchical if there are several nodes with several ranks each, equally many. Else pairwise
    for 8-bit codes, and for 16-bit values between nodes; else native.
    """
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded; used with ``collective`` = ``parameter_server``."""

    @property
    def learns(self) -> bool:
        """Whether it measures the first steps before it plans later ones: if ``threshold_mb`` is ``auto``."""
        return self.threshold_mb == "auto"


class KeepingTable(PoolTable):
    """Settings of an engine that adds up over steps the values that it does not send.

    It sends everything during ``dense_epochs``.
    """

    keeps: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    timing: str
    """The engine whose timing it uses."""
    dense_epochs: NonNegativeFloat | None = None
    """Epochs at the start in which everything is sent.

    Unset: while the recipe's learning rate warms up; without a recipe, none.
    """

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        return super().as_written + (f" with sync.timing '{self.timing}'" if self.defers else "")

    def warmed_up(self, epochs: float) -> Self:
        """Return the settings with ``dense_epochs``, if unset, equal to the warm-up's ``epochs``."""
        return self if self.dense_epochs is not None else self.model_copy(update={"dense_epochs": epochs})


class SparseSync(KeepingTable):
    """Coarse-grained sparse communication (GradientFlow): a share of ``sparsity`` of the pool's chunks is not sent.

    Everything is sent during ``dense_epochs``. Over the next ``ramp_epochs`` the share that is not sent grows to
    ``sparsity``.
    """

    kind: Literal["sparse"] = "sparse"
    wire: Cast = "bf16"
    sparsity: Fraction = 0.875
    """Share of the chunks that is not sent in a step, from 0 to below 1."""
    chunk: PositiveInt = 32768
    """Elements per chunk."""
    ramp_epochs: NonNegativeFloat = 1.0
    """Epochs after ``dense_epochs`` over which the share not sent grows to ``sparsity``."""
    threshold_mb: Fusion = "auto"
    """Size in MiB on the wire at which selected chunks are sent together, or ``auto``.

    ``auto``: 4 MiB on GPUs and 128 KiB on CPUs, but at least 16 KiB per rank.
    """
    timing: Literal["lazy", "hybrid"] = "lazy"
    """The point at which a step waits for its chunks.

    ``lazy``: at the end of backward. ``hybrid``: just before the next forward reads a layer that they belong to.
    """
    collective: Collective | Literal["auto"] = "auto"
    """All-reduce algorithm; ``auto``: as for ``lazy``."""
    momentum_correction: bool = False
    """Whether each rank adds up its velocity instead of its gradient, so that values not sent gather momentum.

    This is Deep Gradient Compression's (arXiv 1712.01887). The optimiser then applies no momentum of its own to
    gradients.
    """
    momentum: Fraction | None = None
    """Momentum of that correction. Unset: the optimiser's; without a recipe, 0.9."""

    @model_validator(mode="after")
    def _can_correct(self) -> Self:
        """Refuse momentum correction with fp16 on the wire, where an overflow would stay in the velocity."""
        if self.momentum_correction and self.wire == "fp16":
            raise ValueError(
                "momentum_correction keeps in its velocity what overflows in wire 'fp16'; take 'bf16' or 'fp32'"
            )
        return self

    @property
    def brings_momentum(self) -> bool:
        """Whether the averaged gradients already contain the optimiser's momentum: with ``momentum_correction``."""
        return self.momentum_correction

    @property
    def velocity_momentum(self) -> float | None:
        """Momentum of the correction; None without correction."""
        if not self.momentum_correction:
            return None
        return 0.9 if self.momentum is None else self.momentum

    def moved_by(self, momentum: float) -> Self:
        """Return the settings with the correction's momentum, if unset, equal to the optimiser's."""
        unset = self.momentum_correction and self.momentum is None
        return self.model_copy(update={"momentum": momentum}) if unset else self

    @property
    def awaits(self) -> Awaits:
        """The point at which a step waits for its chunks, by ``timing``."""
        return "read" if self.timing == "hybrid" else "backward"

    @property
    def share(self) -> float:
        """Share of the values that it sends after its ramp."""
        return 1 - self.sparsity


class PowerSgdSync(KeepingTable):
    """PowerSGD (arXiv 1905.13727): matrices are sent as two factors of ``rank`` columns.

    The approximation error is added to the next gradient. Vectors, and matrices whose factors would not be smaller, are
    sent as they are. Messages are sent and awaited as by the engine ``timing``; under ``dear`` the second factor is
    sent later.
    """

    kind: Literal["powersgd"] = "powersgd"
    wire: Cast = "bf16"
    rank: PositiveInt = 4
    """Columns of each factor; at least 1."""
    timing: Literal["allreduce", "lazy", "hybrid", "dear"] = "lazy"
    """Engine whose timing it uses."""
    bucket_mb: Bytes = 8.0
    """Size in MiB on the wire, before compression, at which neighbouring gradients are sent together.

    Under ``allreduce`` one message holds one layer instead.
    """
    collective: Collective | Literal["auto"] = "auto"
    """All-reduce algorithm; ``auto``: that of the engine ``timing``."""

    @property
    def awaits(self) -> Awaits:
        """The point at which a step waits for its transfers, by ``timing``."""
        match self.timing:
            case "allreduce":
                return "each"
            case "lazy":
                return "backward"
            case "hybrid" | "dear":
                return "read"

    @property
    def learns(self) -> bool:
        """Whether it measures the first steps before it plans later ones: under ``hybrid`` and ``dear``."""
        return self.timing in ("hybrid", "dear")

    def travelling(self, shape: Sequence[int]) -> float:
        """Return how many values it sends for a parameter of ``shape``: its two factors, if fewer."""
        return _in_factors(shape, self.rank)


class HybridSync(CodingTable):
    """Butterfly for small layers, ring for large ones, overlapped with backward and the next forward.

    ``policy`` = ``by-type`` suits AlexNet, ``by-size`` ResNet-50.
    """

    awaits: ClassVar[Awaits] = "read"
    learns: ClassVar[bool] = True

    kind: Literal["hybrid"] = "hybrid"
    wire: Wire = "bf16"
    policy: Literal["by-type", "by-size"] = "by-type"
    """Rule that separates small from large layers.

    ``by-type``: convolutions and norms are small, fully connected layers are large. ``by-size``: the collective that is
    faster on the measured network.
    """
    fuse_mb: Fusion = "auto"
    """Size in MiB on the wire at which neighbouring layers of one kind are sent together, or ``auto``."""
    small: Collective = "butterfly"
    """All-reduce algorithm for small layers."""
    large: Collective = "ring"
    """All-reduce algorithm for large layers.

    A parameter server for one of the two kinds is the thesis' other hybrid.
    """
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded, if ``small`` or ``large`` is ``parameter_server``."""


class DearSync(CodingTable):
    """Reduce-scatter during backward, all-gather during the next forward (arXiv 2302.12445)."""

    awaits: ClassVar[Awaits] = "read"
    learns: ClassVar[bool] = True

    kind: Literal["dear"] = "dear"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"
    """Bucket size in MiB on the wire, or ``auto``."""


class AutoSync(CodingTable):
    """Measures the network and the first steps, then uses the engine that the cost model predicts to be fastest.

    It chooses an exact engine, unless ``inexact`` allows others.
    """

    chooses: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    kind: Literal["auto"] = "auto"
    wire: Wire = "bf16"
    defer: bool = True
    """Whether it may choose an engine that overlaps the next forward."""
    inexact: bool = False
    """Whether it may choose an engine that leaves a part of the gradients to later steps.

    These are ``sparse``, and engines that send gradients as 8-bit codes.
    """
    dense_epochs: NonNegativeFloat | None = None
    """``dense_epochs`` of ``sparse``, if that is chosen. Unset: while the recipe's learning rate warms up."""

    @property
    def awaits(self) -> Awaits:
        """The latest point at which an engine that it may choose waits for its transfers."""
        return "read" if self.defer else "backward"

    @property
    def keeps(self) -> bool:
        """Whether an engine that it may choose adds up values not sent for later steps."""
        return self.inexact or super().keeps

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        allowed = [name for name in ("defer", "inexact") if getattr(self, name)]
        return super().as_written + (f" with {' and '.join(f'sync.{name}' for name in allowed)}" if allowed else "")

    def warmed_up(self, epochs: float) -> Self:
        """Return the settings with ``dense_epochs``, if unset but needed, equal to the warm-up's ``epochs``."""
        if not self.inexact or self.dense_epochs is not None:
            return self
        return self.model_copy(update={"dense_epochs": epochs})


class DdpSync(EngineTable):
    """torch's DistributedDataParallel, as a baseline for comparison."""

    ours: ClassVar[bool] = False

    kind: Literal["ddp"] = "ddp"
    wire: Cast = "fp32"
    bucket_cap_mb: PositiveFloat | None = None
    """Bucket size in MiB; absent: torch's default, a first bucket of 1 MiB and others of 25 MiB."""
    powersgd_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the approximations of torch's PowerSGD hook; 0: off.

    The hook's callbacks start all-reduces, and may start those of two buckets in different orders on different ranks.
    gloo may abort then; with gloo, set ``bucket_cap_mb`` to the size of the model.
    """

    @property
    def exact(self) -> bool:
        """Whether every step's gradients are the mean over ranks: without PowerSGD."""
        return self.powersgd_rank == 0

    @property
    def learns(self) -> bool:
        """Whether it treats the first steps differently: with PowerSGD."""
        return self.powersgd_rank > 0

    def travelling(self, shape: Sequence[int]) -> float:
        """Return how many values it sends for a parameter of ``shape``."""
        return _in_factors(shape, self.powersgd_rank) if self.powersgd_rank else math.prod(shape)


Sync = Annotated[
    AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync | DdpSync,
    Field(discriminator="kind"),
]


def _in_factors(shape: Sequence[int], rank: int) -> int:
    """Return how many values PowerSGD sends for a parameter of ``shape``."""
    rows, size = shape[0] if shape else 1, math.prod(shape)
    return min(size, rank * (rows + size // max(1, rows)))
