"""The gradient-sync engines a recipe can name: their settings, and what others ask of them.

Nobody else needs to know which engine it is, save the ``match`` that builds it (``sync/__init__.py``).
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
Codes = Literal["int8", "fp8"]
Wire = Literal[Cast, Codes]
"""What values travel as: ``int8`` and ``fp8`` (e4m3) are codes with a scale for 512 values, and what they miss is added
to a later step's gradients. Norms, biases, and what stays inside a node, travel in bf16 there."""
Collective = Literal["native", "ring", "butterfly", "pairwise", "hierarchical", "torus2d", "parameter_server"]
Awaits = Literal["each", "backward", "read"]


def _infinity(value: object) -> object:
    """JSON has no infinity, so a job file spells it."""
    return math.inf if value == "Infinity" else value


Bytes = Annotated[float, Field(ge=0, allow_inf_nan=True), BeforeValidator(_infinity)]
"""MiB on the wire; ``inf`` for no limit."""
Fusion = Bytes | Literal["auto"]
"""From how many MiB on the wire on neighbouring gradients leave together; ``auto``: what is best by the cost model for
the network and the model, both measured in the first steps."""


def fusion_bytes(fusion: Fusion) -> float | None:
    """None: to be chosen."""
    return None if fusion == "auto" else fusion * 2**20


def chosen_collective(collective: Collective | Literal["auto"]) -> Collective | None:
    """None: the usual one."""
    return None if collective == "auto" else collective


class EngineTable(Table):
    """A ``[sync]`` table. What is said here of an engine holds for those that do not say otherwise."""

    kind: str
    wire: Wire

    ours: ClassVar[bool] = True
    """Whether it works on a pool; the peer that the others are compared with does not."""
    chooses: ClassVar[bool] = False
    """Whether it predicts what each engine would take, itself included, and lets the fastest take its place."""

    @property
    def keeps(self) -> bool:
        """Whether it adds up over steps what it does not send."""
        return self.wire in get_args(Codes)

    @property
    def awaits(self) -> Awaits:
        """Where a step waits for its transfers.

        ``each``: after each all-reduce, before the next; ``backward``: at the end of backward; ``read``: before a
        layer is read in the next forward.
        """
        return "backward"

    @property
    def defers(self) -> bool:
        """Whether a layer may be updated before the gradients of all others have come."""
        return self.awaits == "read"

    @property
    def exact(self) -> bool:
        """Whether every step's gradients are the mean over ranks, but for the rounding of the wire."""
        return not self.keeps

    @property
    def brings_momentum(self) -> bool:
        """Whether the gradients that come of it have the optimiser's momentum in them."""
        return False

    @property
    def learns(self) -> bool:
        """Whether it measures a few steps before it plans the others."""
        return False

    @property
    def share(self) -> float:
        """The share of the values that it sends, once it is past its ramp."""
        return 1.0

    def travelling(self, shape: Sequence[int]) -> float:
        """How many values it sends for a parameter, once it is past its ramp."""
        return self.share * math.prod(shape)

    @property
    def as_written(self) -> str:
        """How a recipe asks for it, to be told where that will not do."""
        return f"sync.kind '{self.kind}'"

    def warmed_up(self, epochs: float) -> Self:
        """With what follows from a learning rate that warms up over ``epochs``, where it has not been set."""
        return self

    def moved_by(self, momentum: float) -> Self:
        """With what follows from the optimiser's momentum, where it has not been set."""
        return self


class PoolTable(EngineTable):
    """Of an engine of ours."""

    max_ctas: PositiveInt | None = None
    """Thread blocks that NCCL may take for a message; absent: as many as it likes. Fewer leave more of a GPU to
    backward while gradients travel."""


class CodingTable(PoolTable):
    """Of an engine whose gradients may travel as codes."""

    bf16_steps: NonNegativeInt = 0
    """The first so many steps travel in bf16 where ``wire`` is one of codes."""

    @property
    def as_written(self) -> str:
        return super().as_written + (f" in sync.wire '{self.wire}'" if self.wire in get_args(Codes) else "")


class AllReduceSync(CodingTable):
    """One all-reduce a layer after backward: the naive system."""

    awaits: ClassVar[Awaits] = "each"

    kind: Literal["allreduce"] = "allreduce"
    wire: Wire = "fp32"
    collective: Collective = "native"
    servers: PositiveInt = 1
    """Over which a parameter server is sharded."""


class RingSync(CodingTable):
    """A ring all-reduce a bucket of ``bucket_mb``, overlapped with backward."""

    kind: Literal["ring"] = "ring"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"

    @property
    def learns(self) -> bool:
        return self.bucket_mb == "auto"


class LazySync(CodingTable):
    """Fused in the pool until ``threshold_mb``, overlapped with backward (GradientFlow, arXiv 1902.06855)."""

    kind: Literal["lazy"] = "lazy"
    wire: Wire = "bf16"
    threshold_mb: Fusion = "auto"
    collective: Collective | Literal["auto"] = "auto"
    """``auto``: hierarchical where nodes have several ranks; pairwise for 16 bits between nodes of one; else native."""
    servers: PositiveInt = 1
    """Over which a parameter server is sharded."""

    @property
    def learns(self) -> bool:
        return self.threshold_mb == "auto"


class KeepingTable(PoolTable):
    """Of an engine that adds up over steps what it does not send. It sends everything during ``dense_epochs``."""

    keeps: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    timing: str
    """The engine whose timing it takes."""
    dense_epochs: NonNegativeFloat | None = None
    """Unset: while the recipe's learning rate warms up; without a recipe, not at all."""

    @property
    def as_written(self) -> str:
        return super().as_written + (f" with sync.timing '{self.timing}'" if self.defers else "")

    def warmed_up(self, epochs: float) -> Self:
        return self if self.dense_epochs is not None else self.model_copy(update={"dense_epochs": epochs})


class SparseSync(KeepingTable):
    """Coarse-grained sparse communication (GradientFlow): all but ``sparsity`` of the pool's chunks stay behind.

    Everything is sent during ``dense_epochs``; over ``ramp_epochs`` the share that stays grows to ``sparsity``.
    """

    kind: Literal["sparse"] = "sparse"
    wire: Cast = "bf16"
    sparsity: Fraction = 0.875
    chunk: PositiveInt = 32768
    """Elements."""
    ramp_epochs: NonNegativeFloat = 1.0
    threshold_mb: Fusion = "auto"
    timing: Literal["lazy", "hybrid"] = "lazy"
    """Whether chunks are awaited at the end of backward, or just before the next forward reads a layer of theirs."""
    collective: Collective | Literal["auto"] = "auto"
    """``auto``: as ``lazy``'s."""
    momentum_correction: bool = False
    """Whether each rank adds up its velocity instead of its gradient, so that what stays behind gathers momentum (Deep
    Gradient Compression, arXiv 1712.01887); then the optimiser takes none of its own."""
    momentum: Fraction | None = None
    """For that correction. Unset: the optimiser's; without a recipe, 0.9."""

    @model_validator(mode="after")
    def _can_correct(self) -> Self:
        if self.momentum_correction and self.wire == "fp16":
            raise ValueError(
                "momentum_correction keeps in its velocity what overflows in wire 'fp16'; take 'bf16' or 'fp32'"
            )
        return self

    @property
    def brings_momentum(self) -> bool:
        return self.momentum_correction

    @property
    def velocity_momentum(self) -> float | None:
        """Of the correction; None without it."""
        if not self.momentum_correction:
            return None
        return 0.9 if self.momentum is None else self.momentum

    def moved_by(self, momentum: float) -> Self:
        unset = self.momentum_correction and self.momentum is None
        return self.model_copy(update={"momentum": momentum}) if unset else self

    @property
    def awaits(self) -> Awaits:
        return "read" if self.timing == "hybrid" else "backward"

    @property
    def share(self) -> float:
        return 1 - self.sparsity


class PowerSgdSync(KeepingTable):
    """Matrices travel as two factors of ``rank`` columns, what they miss is added to the next gradient (PowerSGD, arXiv
    1905.13727); vectors, and what would not become smaller, as they are. Messages leave and are waited for as those of
    the engine ``timing``; under ``dear`` the second factor leaves later.
    """

    kind: Literal["powersgd"] = "powersgd"
    wire: Cast = "bf16"
    rank: PositiveInt = 4
    timing: Literal["allreduce", "lazy", "hybrid", "dear"] = "lazy"
    bucket_mb: Bytes = 8.0
    """From how many MiB on the wire on, had they not been compressed, neighbours leave together; under ``allreduce`` a
    layer's do."""
    collective: Collective | Literal["auto"] = "auto"
    """``auto``: that of the engine ``timing``."""

    @property
    def awaits(self) -> Awaits:
        match self.timing:
            case "allreduce":
                return "each"
            case "lazy":
                return "backward"
            case "hybrid" | "dear":
                return "read"

    @property
    def learns(self) -> bool:
        return self.timing in ("hybrid", "dear")

    def travelling(self, shape: Sequence[int]) -> float:
        return _in_factors(shape, self.rank)


class HybridSync(CodingTable):
    """Butterfly for small layers, ring for large ones, overlapped with backward and the next forward.

    ``policy`` tells small from large: ``by-type`` (convolutions and norms; fully connected), right for AlexNet, or
    ``by-size`` (whichever the measured network makes faster), right for ResNet-50.
    """

    awaits: ClassVar[Awaits] = "read"
    learns: ClassVar[bool] = True

    kind: Literal["hybrid"] = "hybrid"
    wire: Wire = "bf16"
    policy: Literal["by-type", "by-size"] = "by-type"
    fuse_mb: Fusion = "auto"
    """For neighbouring layers of one kind."""
    small: Collective = "butterfly"
    large: Collective = "ring"
    """How either kind is sent: a parameter server for one of them is the thesis' other hybrid."""
    servers: PositiveInt = 1
    """Over which a parameter server is sharded."""


class DearSync(CodingTable):
    """Reduce-scatter during backward, all-gather during the next forward (arXiv 2302.12445)."""

    awaits: ClassVar[Awaits] = "read"
    learns: ClassVar[bool] = True

    kind: Literal["dear"] = "dear"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"


class AutoSync(CodingTable):
    """Measures the network and the first steps, and takes the engine that the cost model finds fastest: an exact one,
    unless ``inexact`` allows others."""

    chooses: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    kind: Literal["auto"] = "auto"
    wire: Wire = "bf16"
    defer: bool = True
    """Whether it may be one that overlaps the next forward."""
    inexact: bool = False
    """Whether it may be one that leaves a part of the gradients to later steps: ``sparse``, or gradients that travel
    as 8-bit codes."""
    dense_epochs: NonNegativeFloat | None = None
    """Of ``sparse``, should it be chosen. Unset: while the recipe's learning rate warms up."""

    @property
    def awaits(self) -> Awaits:
        """The latest that an engine of its choice may."""
        return "read" if self.defer else "backward"

    @property
    def keeps(self) -> bool:
        return self.inexact or super().keeps

    @property
    def as_written(self) -> str:
        allowed = [name for name in ("defer", "inexact") if getattr(self, name)]
        return super().as_written + (f" with {' and '.join(f'sync.{name}' for name in allowed)}" if allowed else "")

    def warmed_up(self, epochs: float) -> Self:
        if not self.inexact or self.dense_epochs is not None:
            return self
        return self.model_copy(update={"dense_epochs": epochs})


class DdpSync(EngineTable):
    """torch's DistributedDataParallel, the peer to compare with."""

    ours: ClassVar[bool] = False

    kind: Literal["ddp"] = "ddp"
    wire: Cast = "fp32"
    bucket_cap_mb: PositiveFloat | None = None
    """MiB; absent: torch's default, a first bucket of 1 and others of 25."""
    powersgd_rank: Annotated[int, Field(ge=0)] = 0
    """torch's PowerSGD hook with approximations of this rank; 0 turns it off. Its callbacks start all-reduces, those of
    two buckets not in one order on all ranks, at which gloo may abort: there give a ``bucket_cap_mb`` of the model."""

    @property
    def exact(self) -> bool:
        return self.powersgd_rank == 0

    @property
    def learns(self) -> bool:
        return self.powersgd_rank > 0

    def travelling(self, shape: Sequence[int]) -> float:
        return _in_factors(shape, self.powersgd_rank) if self.powersgd_rank else math.prod(shape)


Sync = Annotated[
    AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync | DdpSync,
    Field(discriminator="kind"),
]


def _in_factors(shape: Sequence[int], rank: int) -> int:
    """How many values PowerSGD sends for a parameter."""
    rows, size = shape[0] if shape else 1, math.prod(shape)
    return min(size, rank * (rows + size // max(1, rows)))
