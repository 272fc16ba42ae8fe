"""Compare our training step with a plain PyTorch loop: same model, precision, optimizer and data, one process.

If there are several GPUs, the plain loop also runs on all of them by ``nn.DataParallel``, with as many images on each.

Blocks of steps are timed in interleaved rounds. Each block is compared with the plain loop's block of the same round.

The cost of checkpoints is measured in the same way: a loop that saves its state is compared with the same loop that
does not. Its block ends only when its checkpoint is on the disk, so that no other loop's block overlaps the writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from imagenet_fast.bench.checkpoint_overhead import Saving
from imagenet_fast.bench.rounds import in_rounds, median_ratio
from imagenet_fast.data.build import synthetic_images
from imagenet_fast.data.device import Normalizer
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.distributed.init import DistContext, computes_bf16, prepare_device
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.rows import Row, column
from imagenet_fast.models import compile_blocks
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.schema import Float16, Precision, Recipe
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.optimizers import split_parameters
from imagenet_fast.training.precision import autocast, forward_dtype, set_float32_math
from imagenet_fast.training.train_step import TrainingStep, build_step

Batches = Iterator[tuple[Tensor, Tensor]]

_PLAIN = "plain PyTorch"
_SAVED = ", saved"  # suffix for a loop that also saves checkpoints
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class _Loop:
    """A training loop to be timed."""

    step: Callable[[], None]
    images: int  # of a step
    saving: Saving | None = None  # saves a checkpoint after the first step of each block

    def block(self, steps: int) -> tuple[float, float]:
        """Return the seconds until the host has finished the first of ``steps`` steps, and until all are done."""
        _synchronize()
        begun = time.perf_counter()
        self.step()
        host_s = time.perf_counter() - begun
        if self.saving is not None:
            self.saving()
        for _ in range(steps - 1):
            self.step()
        if self.saving is not None:
            self.saving.settle()
        _synchronize()
        return host_s, time.perf_counter() - begun


def _synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class StepTime(Row):
    """Step time of one loop in seconds: the median, fastest and slowest of its blocks."""

    note = "vs plain: time of a step, divided by the plain loop's. vs unsaved: by the same loop's without checkpoints."

    loop: str = field(metadata=column("loop"))
    """Name of the loop: ``plain PyTorch``, which a user would write, ``nn.DataParallel, N GPUs``, or ``ours,`` and the
    engine; ``, saved`` follows where it also saves checkpoints."""
    step_s: float = field(metadata=column("", "ms/step", ".1f"))
    """Step time, the median of its blocks."""
    step_s_min: float = field(metadata=column("fastest", "ms", ".1f"))
    """That of the fastest block."""
    step_s_max: float = field(metadata=column("slowest", "ms", ".1f"))
    """That of the slowest block."""
    images_per_s: float = field(metadata=column("img/s", form=".0f"))
    """Images a second at the median step time."""
    ratio_to_plain: float = field(metadata=column("vs plain", form=".4f"))
    """Ratio of step times to the plain loop: the median over rounds.

    DataParallel's step has as many images on each GPU as the plain loop's on one.
    """
    host_s: float | None = field(metadata=column("host", "ms", ".1f"))
    """Time until the host has enqueued a step on the GPU: the median over the blocks' first steps.

    None without a GPU.
    """
    warmup_s: float = field(metadata=column("warm-up", "s", ".1f"))
    """Time of the first two steps, including compilation.

    Code that an earlier loop has compiled is not compiled again.
    """
    ratio_to_unsaved: float | None = field(default=None, metadata=column("vs unsaved", form=".4f"))
    """Ratio of step times to the same loop without checkpoints: the median over rounds.

    This and the following fields are None for a loop that saves none.
    """
    stall_s: float | None = field(default=None, metadata=column("stall", "ms", ".1f"))
    """Median time for which a checkpoint stalled the training thread, including the copy to host memory."""
    copied_s: float | None = field(default=None, metadata=column("copy", "ms", ".1f"))
    """Median time of that copy alone."""


def own_precision() -> str:
    """Return the precision in which recipes with bf16 train on this node."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bf16" if computes_bf16(device) else "fp32"


def step_recipe(model: str, image_size: int, batch: int, precision: str, compiled: bool, sync: str = "lazy") -> Recipe:
    """Build a recipe of synthetic images, trained by SGD with momentum.

    Args:
        model: Name of the model.
        image_size: Side of the images in pixels.
        batch: Images per step.
        precision: Name of the precision.
        compiled: Whether to compile the model's blocks.
        sync: Name of the engine.

    Raises:
        UserError: A name is unknown.
    """
    return parse_recipe(
        "bench step",
        {
            "ranks": 1, "global_batch": batch, "epochs": 1, "log_every": 10, "compile": compiled,
            "model": {"kind": model},
            "data": {
                "loader": "synthetic", "image_size": image_size, "classes": 1000,
                "train_images": 64 * batch, "val_images": batch,
            },
            "precision": {"kind": precision},
            "optim": {"kind": "sgd", "lr": 0.01, "weight_decay": 5e-5},
            "schedule": {"kind": "cosine"},
            "sync": {"kind": sync},
        },
    )  # fmt: skip


def bench_step(
    recipe: Recipe, engines: list[Recipe], rounds: int, steps: int, checkpoint_every: int | None = None
) -> list[StepTime]:
    """Time blocks of steps of each loop on one rank.

    Args:
        recipe: The recipe; the plain loop uses all but its ``[sync]`` table. DataParallel's loop does so too, unless
            ``no_data_parallel`` returns a reason.
        engines: The recipe with different ``[sync]`` tables.
        rounds: Number of rounds; each times one block of every loop.
        steps: Steps in each block.
        checkpoint_every: Steps between checkpoints. If set, each engine is also timed while it saves its whole state
            into a temporary directory, and every block has this many steps instead of ``steps``. None means no
            checkpoints.
    """
    steps = checkpoint_every or steps
    with ExitStack() as resources:
        world = single_rank_world()
        resources.callback(dist.destroy_process_group)
        loops = {_PLAIN: _plain_loop(recipe, world)}
        if no_data_parallel(recipe) is None:
            gpus = torch.cuda.device_count()
            wide = recipe.model_copy(update={"global_batch": gpus * recipe.global_batch})
            loops[f"nn.DataParallel, {gpus} GPUs"] = _plain_loop(wide, world, gpus)
        for variant in engines:
            name = f"ours, {variant.sync.kind}"
            loops[name] = _our_loop(our_step(variant, world), variant, world)
            if checkpoint_every is not None:
                take_step = our_step(variant, world)
                root = Path(resources.enter_context(TemporaryDirectory(prefix="bench-step-")))
                saving = resources.enter_context(closing(Saving(variant, world, take_step.state, root)))
                loops[name + _SAVED] = _our_loop(take_step, variant, world, saving)
        warmups = in_rounds(list(loops), 1, lambda name: loops[name].block(_WARMUP_STEPS)[1])
        blocks = in_rounds(list(loops), rounds, lambda name: loops[name].block(steps))
    times = {name: [block_s / steps for _, block_s in of_loop] for name, of_loop in blocks.items()}

    def row(name: str, loop: _Loop) -> StepTime:
        own = times[name]
        launched = median(host_s for host_s, _ in blocks[name]) if world.device.type == "cuda" else None
        plain = StepTime(
            name, median(own), min(own), max(own), loop.images / median(own), median_ratio(own, times[_PLAIN]),
            launched, warmups[name][0],
        )  # fmt: skip
        if loop.saving is None:
            return plain
        stalls = loop.saving.stalls[1:]  # without that of the first steps
        return replace(
            plain,
            ratio_to_unsaved=median_ratio(own, times[name.removesuffix(_SAVED)]),
            stall_s=median(stall.all_s for stall in stalls),
            copied_s=median(stall.copied_s for stall in stalls),
        )

    return [row(name, loop) for name, loop in loops.items()]


def no_data_parallel(recipe: Recipe) -> str | None:
    """Return the reason why ``nn.DataParallel`` is not timed here, as a message; None if it is timed."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        there = "is one" if gpus else "are none"
        return f"nn.DataParallel was skipped: it spreads a batch over GPUs, and of them there {there}"
    if recipe.compile:
        return "nn.DataParallel was skipped: it copies the model in every step, and blocks are compiled for one copy"
    return None


def data_parallel(model: nn.Module, precision: Precision, gpus: int) -> nn.Module:
    """Wrap ``model``, which is on the first GPU, in ``nn.DataParallel`` over the first ``gpus`` GPUs.

    Each batch is divided over these GPUs, and the logits are gathered on the first. On a node without GPUs,
    DataParallel only calls the model itself.
    """
    return nn.DataParallel(_Cast(model, precision), list(range(gpus)))


class _Cast(nn.Module):
    """A model whose forward enables autocast itself.

    DataParallel's threads take over that autocast is enabled, but not its dtype.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, images: Tensor) -> Tensor:
        with autocast(self.precision, images.device):
            logits: Tensor = self.model(images)
        return logits


def single_rank_world() -> DistContext:
    """Initialise a process group of one rank, on the GPU if there is one, and return its context."""
    device, backend = prepare_device(0)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return DistContext(0, 1, 0, 1, device, bf16=True)  # the precision that is asked for is measured, however slow


def synthetic_batches(recipe: Recipe, device: torch.device) -> Batches:
    """Return endless normalised batches for a recipe from ``step_recipe``."""
    assert isinstance(recipe.data, SyntheticData)
    order = TrainSampler(recipe.data.train_images, split_batch(recipe, 1), 0, recipe.seed)
    batches = synthetic_images(order, recipe.data, device, recipe.seed)
    normalise = Normalizer(recipe.data, device, forward_dtype(recipe.precision))
    return ((normalise(images), labels) for images, labels, _ in batches)


def our_step(recipe: Recipe, world: DistContext) -> TrainingStep:
    """Build our training step for a recipe from ``step_recipe``, with fresh weights."""
    recipe = recipe.model_copy(update={"nonfinite_steps": 0})  # non-finite losses do not end the benchmark
    assert isinstance(recipe.data, SyntheticData)
    return build_step(
        recipe, split_batch(recipe, 1), build_initial_model(recipe, recipe.data.classes, world), world, 64
    )


def _our_loop(take_step: TrainingStep, recipe: Recipe, world: DistContext, saving: Saving | None = None) -> _Loop:
    """Build our training loop, with metrics as in a run."""
    batches = synthetic_batches(recipe, world.device)
    record = MetricLogger(Clock().run_s)
    numbers = count(1)

    def step() -> None:
        take_step(batches, recipe.optim.lr)
        if (done := next(numbers)) % recipe.log_every == 0:
            take_step.meter.report(record, done, 1, recipe.optim.lr)

    return _Loop(step, recipe.global_batch, saving)


def _plain_loop(recipe: Recipe, world: DistContext, gpus: int = 1) -> _Loop:
    """Build the loop that a user would write by hand; with several ``gpus``, each batch is divided over them.

    It has forward, backward, fused ``torch.optim.SGD``, a loss read at every log line, and torch's ``GradScaler`` for
    fp16.
    """
    assert isinstance(recipe.data, SyntheticData)
    assert isinstance(recipe.optim, Sgd)
    set_float32_math(recipe.precision)
    model = build_initial_model(recipe, recipe.data.classes, world)
    if recipe.compile:
        compile_blocks(model)
    decayed, plain = split_parameters(model)
    groups = [{"params": decayed, "weight_decay": recipe.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        groups, lr=recipe.optim.lr, momentum=recipe.optim.momentum, nesterov=recipe.optim.nesterov, fused=True
    )
    forward = data_parallel(model, recipe.precision, gpus) if gpus > 1 else model
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    cast = autocast(recipe.precision, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=isinstance(recipe.precision, Float16))
    batches = synthetic_batches(recipe, world.device)
    numbers = count(1)

    def step() -> None:
        images, labels = next(batches)
        with cast:
            loss = criterion(forward(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if next(numbers) % recipe.log_every == 0:
            loss.item()

    return _Loop(step, recipe.global_batch)
