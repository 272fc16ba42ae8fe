"""The recipe: everything that decides a result, as one flat set of tables. See ``recipes/*.toml``.

Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from imagenet_fast.recipe.base import Fraction, Table
from imagenet_fast.recipe.data_config import Data
from imagenet_fast.recipe.pipeline_schedules import chunks_of, misfit
from imagenet_fast.recipe.sync_config import Sync

Percent = Annotated[float, Field(gt=0, le=100)]


class AlexNet(Table):
    """torchvision's AlexNet (Krizhevsky's "one weird trick" variant, 61.1 M parameters)."""

    sharded_width: ClassVar[int] = 4096
    """Units of the fully connected layers that ``parallel.tensor`` divides; 0: it has none so large."""
    most_stages: ClassVar[int] = 8
    """Into how many pieces a pipeline can cut it."""

    kind: Literal["alexnet"]
    dropout: Fraction = 0.5


class AlexNetBN(Table):
    """The AlexNet with batch norm that the large-batch papers train; ``pool5_norm`` as in Jia et al. 2018."""

    sharded_width: ClassVar[int] = 4096
    most_stages: ClassVar[int] = 8

    kind: Literal["alexnet_bn"]
    dropout: Fraction = 0.5
    pool5_norm: bool = False


class ResNet(Table):
    """torchvision's ResNet-18 or ResNet-50; ``zero_init_last_gamma`` starts residual blocks as identities."""

    sharded_width: ClassVar[int] = 0

    kind: Literal["resnet18", "resnet50"]
    zero_init_last_gamma: bool = False

    @property
    def most_stages(self) -> int:
        return {"resnet18": 11, "resnet50": 19}[self.kind]


Model = Annotated[AlexNet | AlexNetBN | ResNet, Field(discriminator="kind")]


class Full(Table):
    """fp32 throughout, on GPUs too."""

    kind: Literal["fp32"]


class TensorFloat(Table):
    """fp32, but matrix products and convolutions in TF32 on GPUs that have it: 10 bits of mantissa, and far faster."""

    kind: Literal["tf32"]


class BFloat16(Table):
    """bf16 autocast over fp32 weights."""

    kind: Literal["bf16"]


class Float16(Table):
    """fp16 autocast over fp32 weights. ``loss_scale`` 0 means dynamic, anything else is kept."""

    kind: Literal["fp16"]
    loss_scale: NonNegativeFloat = 0.0


Precision = Annotated[Full | TensorFloat | BFloat16 | Float16, Field(discriminator="kind")]


class Sgd(Table):
    kind: Literal["sgd"]
    lr: PositiveFloat
    momentum: Fraction = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat


class Lars(Table):
    """LARS (You et al., arXiv 1708.03888). Norm layers take plain SGD steps without decay."""

    kind: Literal["lars"]
    lr: PositiveFloat
    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat
    trust_coefficient: PositiveFloat = 0.001
    epsilon: NonNegativeFloat = 0.0
    clip: bool = False
    """NVCaffe's LARC: the layer's rate is at most ``lr`` instead of a multiple of it."""
    biases: Literal["plain", "scaled"] = "plain"
    """``plain``: biases take SGD's steps at ``lr`` without decay, as in MLPerf's ResNet-50. ``scaled``: each bias is
    decayed and has a rate of its own, as weights are, as in NVCaffe's AlexNet."""


Optim = Annotated[Sgd | Lars, Field(discriminator="kind")]


class Warmup(Table):
    """Rises from ``start_lr`` to the optimiser's ``lr`` over ``warmup_epochs``."""

    warmup_epochs: NonNegativeFloat = 0.0
    start_lr: NonNegativeFloat = 0.0


class Polynomial(Warmup):
    """(1 - t/T)^power down to ``end_lr``, T counted after the warm-up."""

    kind: Literal["polynomial"]
    power: PositiveFloat = 2.0
    end_lr: NonNegativeFloat = 0.0


class StepDecay(Warmup):
    """Multiplied by ``gamma`` at each of ``milestones`` (epochs)."""

    kind: Literal["step"]
    milestones: tuple[PositiveFloat, ...]
    gamma: PositiveFloat = 0.1


class Cosine(Warmup):
    """Half a cosine down to ``end_lr``."""

    kind: Literal["cosine"]
    end_lr: NonNegativeFloat = 0.0


Schedule = Annotated[Polynomial | StepDecay | Cosine, Field(discriminator="kind")]


class Parallel(Table):
    """The axes of parallelism. What ``tensor`` and ``pipeline`` leave of the ranks is data parallelism."""

    tensor: PositiveInt = 1
    """Ranks that hold AlexNet's large layers together, and exchange activations instead of those layers' gradients
    (Krizhevsky's "one weird trick", arXiv 1404.5997). That is fewer bytes while those ranks see less than 4096 images
    a step; but activations are waited for, and gradients may travel meanwhile."""
    pipeline: PositiveInt = 1
    """Stages, one after another, into which the model is cut; each has ranks of its own."""
    micro_batches: PositiveInt = 1
    """Into which a pipeline cuts what it sees at once; with one, a stage works while all others wait."""
    schedule: str = "1f1b"
    """When a stage does which forward and which backward: gpipe, 1f1b or interleaved."""

    @property
    def ranks(self) -> int:
        """That hold the model together; data parallelism is over as many times more."""
        return self.tensor * self.pipeline

    def layout(self, ranks: int) -> str:
        """The name of what it makes of so many ranks: ``dp4``, ``tp4``, ``pp2dp2``."""
        return "".join(f"{axis}{size}" for axis, size in self.axes(ranks).items() if size > 1) or "dp1"

    def axes(self, ranks: int) -> dict[str, int]:
        """The size of each axis, over so many ranks."""
        return {"pp": self.pipeline, "dp": ranks // self.ranks, "tp": self.tensor}

    @property
    def as_written(self) -> str:
        """How a recipe asks for it, to be told where that will not do."""
        axes = [f"parallel.{axis} {getattr(self, axis)}" for axis in ("tensor", "pipeline") if getattr(self, axis) > 1]
        return " x ".join(axes)

    @model_validator(mode="after")
    def _schedule_fits(self) -> Parallel:
        if self.pipeline == 1:
            if self.micro_batches > 1:
                raise ValueError(f"micro_batches {self.micro_batches} are those of a pipeline, and pipeline is 1")
            if self.schedule != "1f1b":
                raise ValueError(f"schedule '{self.schedule}' is that of a pipeline, and pipeline is 1")
        elif (why := misfit(self.schedule, self.pipeline, self.micro_batches)) is not None:
            raise ValueError(why)
        return self


class Checkpointing(Table):
    """When the training's state is saved, besides at each evaluation and at the end."""

    every_steps: NonNegativeInt = 0
    """0: not after a number of steps."""
    every_minutes: NonNegativeFloat = 10.0
    """Since the last one was begun; 0: not after a time."""
    keep: NonNegativeInt = 1
    """Checkpoints kept besides the newest and the best. With 0 there may be no other if the newest is damaged."""
    grace_s: PositiveFloat = 50.0
    """How long a rank may take to save and end once a signal has asked it to. Kubernetes kills 60 s after SIGTERM."""


class Timeout(Table):
    """How long a rank may stand still, in one phase of a step, before all end and it is named. Waiting counts too."""

    first_step_s: PositiveFloat = 300.0
    """Whatever is done for the first time, as it may compile and connect: all until the second step, and the first
    evaluation."""
    step_s: PositiveFloat = 100.0


class Recipe(Table):
    """A complete training run. The global batch is fixed; ranks decide how it is split, not what is learned."""

    ranks: PositiveInt
    """The number of ranks the recipe was written for; decides the micro-batch when ``micro_batch`` is 0."""
    global_batch: PositiveInt
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Images a rank sees at once, and so the batch-norm span; 0 means global_batch / ranks."""
    epochs: PositiveInt
    target_top1: Percent | None = None
    """Training stops at the first evaluation that reaches it (percent); absent: it trains to the end."""
    eval_every: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    first_eval: PositiveInt | None = None
    """The first epoch after which is evaluated; absent: ``eval_every``."""
    log_every: PositiveInt = 10
    """Steps between log lines."""
    nonfinite_steps: NonNegativeInt = 5
    """The run ends where the loss has not been finite for so many steps in a row, which is looked at with every log
    line; nothing is saved meanwhile. 0: it goes on, and is saved, whatever the loss."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    label_smoothing: Fraction = 0.0
    clip_norm: NonNegativeFloat = 0.0
    """Gradients are scaled down together where their global L2 norm exceeds it; 0 turns it off."""
    ema_decay: Fraction = 0.0
    """Evaluate and save a moving average of the weights with this decay a step; 0 turns it off."""
    channels_last: bool = True
    compile: bool = False
    """torch.compile, block by block so that gradients still surface layer by layer."""
    numa_binding: bool = True
    """Each rank keeps to the cores of the NUMA node that its GPU is on, where the kernel tells which."""
    model: Model
    data: Data
    precision: Precision
    optim: Optim
    schedule: Schedule
    sync: Sync
    parallel: Parallel = Parallel()
    checkpoint: Checkpointing = Checkpointing()
    timeout: Timeout = Timeout()

    def evaluates_after(self, epoch: int) -> bool:
        """Whether an evaluation follows epoch ``epoch``, counted from 1."""
        since_first = epoch - (self.first_eval or self.eval_every)
        return epoch == self.epochs or (since_first >= 0 and since_first % self.eval_every == 0)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.schedule.warmup_epochs > self.epochs:
            raise ValueError(f"schedule.warmup_epochs ({self.schedule.warmup_epochs}) exceeds epochs ({self.epochs})")
        smallest = {"alexnet": 63, "alexnet_bn": 67}.get(self.model.kind, 32)
        sizes = {"image_size": self.data.image_size, "eval_size": self.data.evaluated_size}
        sizes |= {f"sizes from epoch {epoch} on": size for epoch, size in self.data.sizes}
        for key, size in sizes.items():
            if size < smallest:
                raise ValueError(f"data.{key} ({size}) is too small for {self.model.kind}, which needs {smallest}")
        self._check_sync()
        self._check_parallel()
        sync = self.sync.warmed_up(self.schedule.warmup_epochs).moved_by(self.optim.momentum)
        return self if sync is self.sync else self.model_copy(update={"sync": sync})

    def _check_sync(self) -> None:
        """Refuse what needs all gradients at once where an engine updates layers one by one, or leaves some behind."""
        sync = self.sync
        if sync.defers:
            if self.clip_norm:
                raise ValueError(
                    f"{sync.as_written} updates a layer before the gradients of all others have come, so it cannot "
                    f"clip their global norm (clip_norm {self.clip_norm})"
                )
            if self.compile:
                raise ValueError(
                    f"{sync.as_written} waits for single layers, so it cannot do with compiled blocks (compile true)"
                )
        if sync.brings_momentum and (isinstance(self.optim, Lars) or self.optim.nesterov):
            which = "optim.kind 'lars'" if isinstance(self.optim, Lars) else "optim.nesterov true"
            raise ValueError(
                f"sync.momentum_correction gathers plain SGD's momentum before gradients are averaged, and {which} "
                "is another; turn it off, or take optim.kind 'sgd' without nesterov"
            )
        if sync.keeps:
            why = f"{sync.as_written} adds up gradients over steps, so it cannot"
            if self.clip_norm:
                raise ValueError(f"{why} clip the norm of one (clip_norm {self.clip_norm})")
            if isinstance(self.precision, Float16):
                raise ValueError(f"{why} drop one that overflows (precision.kind 'fp16')")

    def _check_parallel(self) -> None:
        """Refuse to divide what the model does not have, or what an engine or a compiler takes for whole."""
        tensor, width, kind = self.parallel.tensor, self.model.sharded_width, self.model.kind
        if tensor > 1 and not width:
            raise ValueError(
                f"parallel.tensor {tensor} divides AlexNet's large fully connected layers, and model.kind '{kind}' has "
                "no such layers"
            )
        if tensor > 1 and width % tensor:
            below = next(n for n in range(tensor, 0, -1) if width % n == 0)
            above = next((f" and {n}" for n in range(tensor, width + 1) if width % n == 0), "")
            raise ValueError(
                f"parallel.tensor {tensor} does not divide the {width} units of {kind}'s fully connected layers; the "
                f"nearest that do are {below}{above}"
            )
        stages = self.parallel.pipeline * chunks_of(self.parallel.schedule)
        if self.parallel.pipeline > 1 and stages > self.model.most_stages:
            raise ValueError(
                f"parallel.pipeline {self.parallel.pipeline} with schedule {self.parallel.schedule} cuts {kind} into "
                f"{stages} stages, and it comes in {self.model.most_stages} pieces; ask for fewer"
            )
        if self.parallel.ranks == 1:
            return
        asked = self.parallel.as_written
        if self.parallel.pipeline > 1 and self.data.sizes:
            raise ValueError(f"{asked} sends activations of one size, so images cannot grow (data.sizes)")
        if self.compile:
            raise ValueError(f"{asked} sends activations amid what would be compiled as one piece (compile true)")
        if not self.sync.ours:
            raise ValueError(
                f"{asked} averages some parameters over other ranks than others, and {self.sync.as_written} has one "
                "group of ranks for all"
            )
