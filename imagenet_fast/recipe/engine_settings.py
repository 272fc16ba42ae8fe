"""The gradient-sync engines a recipe can name: their settings, and what others ask of them.

Nobody else needs to know which engine it is, save the ``match`` that builds it (``sync/__init__.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from imagenet_fast.recipe.table import Fraction, Table

Wire = Literal["fp32", "bf16", "fp16"]
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
    keeps: ClassVar[bool] = False
    """Whether it adds up over steps what it does not send."""
    chooses: ClassVar[bool] = False
    """Whether it predicts what each engine would take, itself included, and lets the fastest take its place."""

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
        return True

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


class AllReduceSync(EngineTable):
    """One all-reduce a layer after backward: the naive system."""

    awaits: ClassVar[Awaits] = "each"

    kind: Literal["allreduce"] = "allreduce"
    wire: Wire = "fp32"
    collective: Collective = "native"
    servers: PositiveInt = 1
    """Over which a parameter server is sharded."""


class RingSync(EngineTable):
    """A ring all-reduce a bucket of ``bucket_mb``, overlapped with backward."""

    kind: Literal["ring"] = "ring"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"

    @property
    def learns(self) -> bool:
        return self.bucket_mb == "auto"


class LazySync(EngineTable):
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


class KeepingTable(EngineTable):
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
    wire: Wire = "bf16"
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
    wire: Wire = "bf16"
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
        rows, size = shape[0] if shape else 1, math.prod(shape)
        return min(size, self.rank * (rows + size // max(1, rows)))


class HybridSync(EngineTable):
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


class DearSync(EngineTable):
    """Reduce-scatter during backward, all-gather during the next forward (arXiv 2302.12445)."""

    awaits: ClassVar[Awaits] = "read"
    learns: ClassVar[bool] = True

    kind: Literal["dear"] = "dear"
    wire: Wire = "bf16"
    bucket_mb: Fusion = "auto"


class AutoSync(EngineTable):
    """Measures the network and the first steps, and takes the exact engine that the cost model finds fastest."""

    chooses: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    kind: Literal["auto"] = "auto"
    wire: Wire = "bf16"
    defer: bool = True
    """Whether it may be one that overlaps the next forward."""

    @property
    def awaits(self) -> Awaits:
        """The latest that an engine of its choice may."""
        return "read" if self.defer else "backward"

    @property
    def as_written(self) -> str:
        return super().as_written + (" with sync.defer" if self.defer else "")


class DdpSync(EngineTable):
    """torch's DistributedDataParallel, the peer to compare with."""

    ours: ClassVar[bool] = False

    kind: Literal["ddp"] = "ddp"
    wire: Wire = "fp32"
    bucket_cap_mb: PositiveFloat | None = None
    """MiB; absent: torch's default, a first bucket of 1 and others of 25."""
    powersgd_rank: Annotated[int, Field(ge=0)] = 0
    """torch's PowerSGD hook with approximations of this rank; 0 turns it off. Its callbacks start all-reduces, those of
    two buckets not in one order on all ranks, at which gloo may abort: there give a ``bucket_cap_mb`` of the model."""

    @property
    def exact(self) -> bool:
        return self.powersgd_rank == 0


Sync = Annotated[
    AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync | DdpSync,
    Field(discriminator="kind"),
]
