"""The recipe: all settings that decide a run's result, as one set of tables. See ``recipes/*.toml``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from imagenet_fast.recipe.base import Fraction, Table
from imagenet_fast.recipe.data_config import Data
from imagenet_fast.recipe.network import ExternalModel, Network, NormedNetwork
from imagenet_fast.recipe.optim_config import Lars, Optim, Schedule
from imagenet_fast.recipe.parallel_config import Parallel, chunks_of
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.recipe.sync_table import Codes


class AlexNet(Network):
    """torchvision's AlexNet (Krizhevsky's "one weird trick" variant, 61.1 M parameters)."""

    sharded_width: ClassVar[int] = 4096
    smallest_image: ClassVar[int] = 63
    most_stages: ClassVar[int] = 8

    kind: Literal["alexnet"]
    dropout: Fraction = 0.5
    """Dropout probability, from 0 to below 1."""


class AlexNetBN(NormedNetwork):
    """AlexNet with batch norm, as trained in the large-batch papers.

    ``pool5_norm`` is as in Jia et al. 2018.
    """

    sharded_width: ClassVar[int] = 4096
    smallest_image: ClassVar[int] = 67
    most_stages: ClassVar[int] = 8

    kind: Literal["alexnet_bn"]
    dropout: Fraction = 0.5
    """Dropout probability, from 0 to below 1."""
    pool5_norm: bool = False
    """Whether to add a batch norm after the last pooling layer, pool5."""


class ResNet(NormedNetwork):
    """torchvision's ResNet-18 or ResNet-50."""

    smallest_image: ClassVar[int] = 32

    kind: Literal["resnet18", "resnet50"]
    zero_init_last_gamma: bool = False
    """Whether residual blocks start as identities: each block's last batch norm has gamma 0."""

    @property
    def most_stages(self) -> int:
        """Largest number of pipeline stages that the model can be split into."""
        return {"resnet18": 11, "resnet50": 19}[self.kind]


class CifarNet(Network):
    """The network of airbench's fastest CIFAR-10 trainings (Jordan, arXiv 2404.00498).

    Its first layer whitens patches, by weights computed from training images when a run begins.
    """

    smallest_image: ClassVar[int] = 16
    most_stages: ClassVar[int] = 5

    kind: Literal["cifarnet"]
    widths: tuple[PositiveInt, PositiveInt, PositiveInt] = (64, 256, 256)
    """Channels of the three groups of convolutions."""


Model = Annotated[AlexNet | AlexNetBN | ResNet | CifarNet | ExternalModel, Field(discriminator="kind")]


class Unscaled(Table):
    """A precision without a loss scale."""

    kind: Literal["fp32", "tf32", "bf16"]
    """``fp32``: fp32 throughout, on GPUs too. ``tf32``: fp32, with matrix products and convolutions in TF32 on GPUs
    that have it. ``bf16``: bf16 autocast over fp32 weights; fp32 if a rank's CPU has no instructions for bf16.
    """


class Float16(Table):
    """fp16 autocast over fp32 weights."""

    kind: Literal["fp16"]
    loss_scale: NonNegativeFloat = 0.0
    """Loss scale; 0: dynamic, any other value stays fixed."""


Precision = Annotated[Unscaled | Float16, Field(discriminator="kind")]


Seconds = Annotated[float, Field(gt=0, le=1e8)]


class Checkpointing(Table):
    """Times to save the training state, in addition to each evaluation and the end of the run."""

    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; 0: none by step count."""
    every_minutes: NonNegativeFloat = 10.0
    """Minutes from the start of one checkpoint to the next; 0: none by time."""
    keep: NonNegativeInt = 1
    """Checkpoints to keep in addition to the newest and the best.

    With 0 there may be no other if the newest is damaged.
    """
    grace_s: Seconds = 50.0
    """Seconds that a rank may take to save and end after a signal; above 0.

    Jobs of `launch` give it at least as long. Other pods of Kubernetes are killed 30 s after SIGTERM by default.
    """


class Timeout(Table):
    """Longest time that a rank may spend in one phase of a step before all ranks end and it is reported.

    A rank that waits for others is as alive as they are: it ends if one is lost, or all wait for each other so long.
    """

    first_step_s: Seconds = 300.0
    """Seconds for anything done for the first time, as it may compile and connect; above 0.

    This covers everything until the second step, the first evaluation, and the first step with images of another size.
    """
    step_s: Seconds = 100.0
    """Seconds in all other phases; above 0."""


class Recipe(Table):
    """A complete training run.

    The global batch is fixed: the number of ranks decides how it is split, not what is learned.
    """

    reference_ranks: PositiveInt
    """Ranks that the recipe was written for; a run may have others. It sets the micro-batch if ``micro_batch`` is 0."""
    global_batch: PositiveInt
    """Images per optimizer step, over all ranks; at least 1."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Images a rank processes at once; batch norms take statistics over them. 0: global_batch / reference_ranks."""
    epochs: PositiveInt
    """Epochs to train; at least 1."""
    target_top1: Annotated[float, Field(gt=0, le=100)] | None = None
    """Top-1 accuracy, in percent, at which to stop; above 0 and at most 100.

    Training stops at the first evaluation that reaches it. Absent: train to the end.
    """
    target_mirrored: bool = False
    """Compare ``target_top1`` with the accuracy under test-time augmentation, and not with the plain one.

    That is the accuracy of ``eval_shift`` if it is set, else that of ``eval_mirror``.
    """
    eval_every: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    first_eval: PositiveInt | None = None
    """First epoch, from 1, that is followed by an evaluation; absent: ``eval_every``."""
    eval_mirror: bool = False
    """Whether evaluations also report the accuracy of an image's and its mirror image's mean logits.

    This test-time augmentation (TTA) is reported beside the plain accuracy and takes another forward of each image.
    """
    eval_shift: NonNegativeInt = 0
    """Pixels of shift for one more accuracy, by mean logits, of evaluations with ``eval_mirror``; 0: none.

    Half of the weight is on the image; a quarter is on the image moved up and left, and a quarter on the image moved
    down and right, with its reflection at the edges; each with its mirror image. It is reported beside the others and
    takes four more forwards of each image. 1 on CIFAR-10 is airbench's evaluation.
    """
    log_every: PositiveInt = 10
    """Steps between log lines."""
    nonfinite_steps: NonNegativeInt = 5
    """Consecutive steps with a non-finite loss that end the run; 0: never.

    They are checked at each log line. Nothing is saved while the loss is not finite; with 0 the run continues, and is
    saved, whatever the loss.
    """
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of weights, data order and augmentation; from 0 to below 2**31."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Loss: cross-entropy, or ``bce``, the sum of the classes' binary cross-entropies."""
    label_smoothing: Fraction = 0.0
    """Label smoothing, from 0 to below 1; 0: off."""
    clip_norm: NonNegativeFloat = 0.0
    """Largest global L2 norm of all gradients; if it is larger, they are scaled down together. 0: off."""
    ema_decay: Fraction = 0.0
    """Decay per step of a moving average of the weights, which is then evaluated and saved; from 0 to below 1.

    0: off.
    """
    channels_last: bool = True
    """Whether to store weights, images and activations in channels_last memory format.

    Networks that call ``view`` on feature maps need false.
    """
    compile: bool = False
    """Whether to use torch.compile, block by block, so that gradients still become ready layer by layer."""
    graph: bool | Literal["auto"] = "auto"
    """Whether to replay steps from a CUDA graph, once each repeats the one before. This costs the host almost nothing.

    ``auto``: on GPUs, where the engine allows it and a replayed step ends like a launched one. true: without that
    comparison. false: launch every step.
    """
    numa_binding: bool = True
    """Whether to bind each rank to the cores of its GPU's NUMA node.

    It has no effect where the kernel does not report the NUMA node.
    """
    model: Model
    data: Data
    precision: Precision
    optim: Optim
    schedule: Schedule
    sync: Sync
    parallel: Parallel = Parallel()
    checkpoint: Checkpointing = Checkpointing()
    timeout: Timeout = Timeout()

    @property
    def unreplayable(self) -> str:
        """Why steps cannot be replayed from a CUDA graph; empty if they can."""
        if self.parallel.ranks > 1:
            return f"{self.parallel.as_written} sends activations in the middle of a step"
        return f"{self.sync.as_written} {self.sync.unreplayable}" if self.sync.unreplayable else ""

    @property
    def unfusable(self) -> str:
        """Why kernels of this program cannot compute norms, as the end of a sentence; empty if they can."""
        if self.compile:
            return "compile true leaves that to torch"
        return "" if self.channels_last else "kernels want channels_last, which is false"

    def evaluates_after(self, epoch: int) -> bool:
        """Return whether an evaluation follows epoch ``epoch``, counted from 1."""
        since_first = epoch - (self.first_eval or self.eval_every)
        return epoch == self.epochs or (since_first >= 0 and since_first % self.eval_every == 0)

    def doubts(self) -> list[str]:
        """Return one sentence for each value that is allowed, but looks like a mistake."""
        found: list[str] = []
        if self.target_top1 is not None and self.target_top1 < 1:
            found.append(f"target_top1 is {self.target_top1:g} %; did you mean {100 * self.target_top1:g}?")
        for key in ("start_lr", "end_lr"):
            rate = getattr(self.schedule, key, 0.0)
            if rate > self.optim.lr:
                found.append(f"schedule.{key} is {rate:g}, above optim.lr ({self.optim.lr:g}); lower it, too")
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        """Check settings of different tables against each other, and fill in derived sync settings."""
        if self.schedule.warmup_epochs > self.epochs:
            raise ValueError(f"schedule.warmup_epochs ({self.schedule.warmup_epochs}) exceeds epochs ({self.epochs})")
        for key in ("target_mirrored", "eval_shift"):
            if getattr(self, key) and not self.eval_mirror:
                raise ValueError(f"{key} is for eval_mirror, which is off; set eval_mirror to true")
        if self.eval_shift >= self.data.evaluated_size:
            raise ValueError(
                f"eval_shift ({self.eval_shift}) must be less than the side of a validation image "
                f"({self.data.evaluated_size} pixels), which is reflected at its edges"
            )
        if self.compile and isinstance(self.model, ExternalModel):
            raise ValueError(
                f"compile true compiles known blocks, and model.kind '{self.model.kind}' has none; set compile to false"
            )
        smallest = self.model.smallest_image
        sizes = {"image_size": self.data.image_size, "eval_size": self.data.evaluated_size}
        sizes |= {f"sizes from epoch {epoch:g} on": size for epoch, size in self.data.sizes}
        for key, size in sizes.items():
            if size < smallest:
                raise ValueError(f"data.{key} ({size}) is too small for {self.model.kind}, which needs {smallest}")
        self._check_sync()
        self._check_parallel()
        if self.graph is True and self.unreplayable:
            raise ValueError(f"graph true replays steps, and {self.unreplayable}; set graph to 'auto'")
        if getattr(self.model, "fused_norm", False) is True and self.unfusable:
            raise ValueError(f"model.fused_norm true fuses norms, and {self.unfusable}; set model.fused_norm to 'auto'")
        sync = self.sync.derived(dense_epochs=self.schedule.warmup_epochs, momentum=self.optim.momentum)
        return self if sync is self.sync else self.model_copy(update={"sync": sync})

    def _check_sync(self) -> None:
        """Refuse settings that the sync engine cannot provide.

        An engine that updates layers one by one does not have all gradients at once. An engine that keeps some
        gradients for later steps does not have the gradients of one step.
        """
        sync = self.sync
        if sync.velocity_momentum is not None and (isinstance(self.optim, Lars) or self.optim.nesterov):
            which = "optim.kind 'lars'" if isinstance(self.optim, Lars) else "optim.nesterov true"
            raise ValueError(
                f"sync.momentum_correction gathers plain SGD's momentum before gradients are averaged, and {which} "
                "is another; turn it off, or take optim.kind 'sgd' without nesterov"
            )
        early, sums = "updates a layer before the gradients of all others have come", "adds up gradients over steps"
        clips, overflows = self.clip_norm > 0, isinstance(self.precision, Float16)
        for conflict, does, cannot, key, value, instead in (
            (sync.defers and clips, early, "clip their global norm", "clip_norm", self.clip_norm, "0"),
            (sync.defers and self.compile, "waits for each layer", "use compiled blocks", "compile", "true", "false"),
            (sync.keeps and clips, sums, "clip the norm of one", "clip_norm", self.clip_norm, "0"),
            (sync.keeps and overflows, sums, "drop one that overflows", "precision.kind", "'fp16'", "'bf16'"),
        ):
            if conflict:
                coded = does == sums and sync.wire in get_args(Codes)
                other = "sync.wire 'bf16'" if coded else "another engine, such as sync.kind 'lazy'"
                raise ValueError(
                    f"{sync.as_written} {does}, so it cannot {cannot} ({key} {value}); set {key} to {instead}, or take "
                    f"{other}"
                )

    def _check_parallel(self) -> None:
        """Refuse axes that do not fit the model, the sync engine or torch.compile."""
        tensor, width, kind = self.parallel.tensor, self.model.sharded_width, self.model.kind
        if tensor > 1 and not width:
            raise ValueError(
                f"parallel.tensor {tensor} divides AlexNet's large fully connected layers, and model.kind '{kind}' has "
                "no such layers"
            )
        if tensor > 1 and width % tensor:
            raise ValueError(
                f"parallel.tensor {tensor} does not divide the {width} units of {kind}'s fully connected layers; take "
                f"a power of 2 up to {width}"
            )
        if tensor > 1 and self.sync.chooses and self.sync.defers and isinstance(self.optim, Lars):
            raise ValueError(
                f"{self.sync.as_written} may choose other engines for other shards, and optim.kind 'lars' adds up "
                "norms over shards in each update; set sync.defer to false, or name an engine"
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
                "group of ranks for all; take another engine, such as sync.kind 'lazy', or set parallel to {}"
            )
