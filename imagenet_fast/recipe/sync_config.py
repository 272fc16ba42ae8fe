"""The gradient-sync engines a recipe can name, and their settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from imagenet_fast.recipe.base import Bytes, Fraction
from imagenet_fast.recipe.sync_table import (
    Awaits,
    Cast,
    CodingTable,
    Collective,
    Fusion,
    PoolTable,
    SyncTable,
    Wire,
)


class AllReduceSync(CodingTable):
    """One all-reduce per layer after backward: the naive baseline."""

    awaits: ClassVar[Awaits] = "each"

    kind: Literal["allreduce"] = "allreduce"
    wire: Wire = "fp32"
    """Wire dtype of the gradients."""
    collective: Collective = "native"
    """All-reduce algorithm."""
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded; used with ``collective`` = ``parameter_server``."""
    fused: bool = False
    """Whether all gradients are one all-reduce after backward, as in NVIDIA's submissions to MLPerf."""


class RingSync(CodingTable):
    """A ring all-reduce per bucket of ``bucket_mb``, overlapped with backward."""

    kind: Literal["ring"] = "ring"
    bucket_mb: Fusion = "auto"
    """Bucket size in MiB on the wire, or ``auto``."""


class LazySync(CodingTable):
    """All-reduces of gradients fused in the pool until ``threshold_mb``, overlapped with backward.

    After GradientFlow (arXiv 1902.06855).
    """

    kind: Literal["lazy"] = "lazy"
    threshold_mb: Fusion = "auto"
    """Size in MiB on the wire at which neighbouring gradients are sent, or ``auto``."""
    collective: Collective | Literal["auto"] = "auto"
    """All-reduce algorithm.

    ``auto``: hierarchical if there are several nodes with several ranks each, equally many. Else pairwise
    for 8-bit codes, and for 16-bit values between nodes; else native.
    """
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded; used with ``collective`` = ``parameter_server``."""


class KeepingTable(PoolTable):
    """Settings of an engine that adds up over steps the values that it does not send."""

    keeps: ClassVar[bool] = True
    unreplayable: ClassVar[str] = "decides in each step what to send"
    telling: ClassVar[tuple[str, ...]] = ("timing",)

    wire: Cast = "bf16"
    """Wire dtype of the gradients."""
    timing: str
    """The engine whose timing it uses."""
    dense_epochs: NonNegativeFloat | None = None
    """Epochs at the start in which everything is sent.

    Unset: while the recipe's learning rate warms up; without a recipe, none.
    """

    @property
    def awaits(self) -> Awaits:
        """The point at which a step of the engine ``timing`` waits for its transfers."""
        return engines()[self.timing].model_validate({}).awaits


class SparseSync(KeepingTable):
    """Coarse-grained sparse communication (GradientFlow): a share of ``sparsity`` of the pool's chunks is not sent."""

    kind: Literal["sparse"] = "sparse"
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

    This is Deep Gradient Compression's (arXiv 1712.01887). The optimizer then applies no momentum of its own to
    gradients.
    """
    momentum: Fraction | None = None
    """Momentum of that correction. Unset: the optimizer's; without a recipe, 0.9."""

    @model_validator(mode="after")
    def _can_correct(self) -> Self:
        """Refuse momentum correction with fp16 on the wire, where an overflow would stay in the velocity."""
        if self.momentum_correction and self.wire == "fp16":
            raise ValueError(
                "momentum_correction keeps in its velocity what overflows in wire 'fp16'; take 'bf16' or 'fp32'"
            )
        return self

    @property
    def velocity_momentum(self) -> float | None:
        """Momentum of the correction; None without correction."""
        if not self.momentum_correction:
            return None
        return 0.9 if self.momentum is None else self.momentum

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

    unreplayable: ClassVar[str] = "has matrices factored by a solver that the host drives"

    kind: Literal["powersgd"] = "powersgd"
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

    def values_sent(self, shape: Sequence[int]) -> float:
        """Return how many values it sends for a parameter of ``shape``: its two factors, if fewer."""
        return in_factors(*matrix_of(shape), self.rank)


class HybridSync(CodingTable):
    """Butterfly for small layers, ring for large ones, overlapped with backward and the next forward.

    ``policy`` = ``by-type`` suits AlexNet, ``by-size`` ResNet-50.
    """

    awaits: ClassVar[Awaits] = "read"

    kind: Literal["hybrid"] = "hybrid"
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

    A parameter server for one of the two kinds is the other hybrid of Kim et al.
    """
    servers: PositiveInt = 1
    """Ranks over which a parameter server is sharded, if ``small`` or ``large`` is ``parameter_server``."""


class DearSync(CodingTable):
    """Reduce-scatter during backward, all-gather during the next forward (arXiv 2302.12445)."""

    awaits: ClassVar[Awaits] = "read"

    kind: Literal["dear"] = "dear"
    bucket_mb: Fusion = "auto"
    """Bucket size in MiB on the wire, or ``auto``."""


class AutoSync(CodingTable):
    """Measures the network and the first steps, then uses the engine that the cost model predicts to be fastest.

    It chooses an exact engine, unless ``inexact`` allows others.
    """

    chooses: ClassVar[bool] = True
    telling: ClassVar[tuple[str, ...]] = ("defer", "inexact")

    kind: Literal["auto"] = "auto"
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


class DdpSync(SyncTable):
    """torch's DistributedDataParallel, as a baseline for comparison."""

    ours: ClassVar[bool] = False
    unreplayable: ClassVar[str] = "keeps parts of autograd's graph from step to step"

    kind: Literal["ddp"] = "ddp"
    wire: Cast = "fp32"
    """Wire dtype of the gradients."""
    bucket_cap_mb: PositiveFloat | None = None
    """Bucket size in MiB; absent: torch's default, a first bucket of 1 MiB and others of 25 MiB."""


EngineSettings = AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync
Sync = Annotated[EngineSettings | DdpSync, Field(discriminator="kind")]


def engines() -> dict[str, type[SyncTable]]:
    """Return the table of each engine."""
    return {member.model_fields["kind"].default: member for member in get_args(get_args(Sync)[0])}


def matrix_of(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of the matrix that PowerSGD makes of a parameter.

    They are the outermost size above 1 and the product of all others; a vector or a number has one column.

    Args:
        sizes: The parameter's sizes, the outermost in memory first.
    """
    size, wide = math.prod(sizes), [size for size in sizes if size > 1]
    rows = wide[0] if len(wide) > 1 else size
    return rows, size // max(1, rows)


def in_factors(rows: int, columns: int, rank: int) -> int:
    """Return how many values are sent for a matrix: its two factors, if those are fewer."""
    return min(rank * (rows + columns), rows * columns)
