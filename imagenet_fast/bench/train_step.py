"""Compare our training step with a plain PyTorch loop: same model, precision, optimizer and data, one process.

If there are several GPUs, the plain loop also runs on all of them by ``nn.DataParallel``, with as many images on each.

Blocks of steps are timed in turn, so that all loops are measured under the same noise. Each block is compared with the
plain loop's block of the same round, and the median of these ratios is reported: a slow phase of the node slows both.

The cost of checkpoints is measured in the same way: a loop that saves its state is compared with the same loop that
does not. Its block ends only when its checkpoint is on the disk, so that no other loop's block overlaps the writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from imagenet_fast.bench.checkpoint_overhead import CheckpointStalls, Saving
from imagenet_fast.bench.progress import measurement_bar
from imagenet_fast.data.build import synthetic_images
from imagenet_fast.data.device import Normalizer
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.distributed.init import DistContext, computes_bf16, prepare_device
from imagenet_fast.errors import UserError
from imagenet_fast.metrics import MetricLogger
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

_NETWORKS = ("alexnet", "alexnet_bn", "resnet18", "resnet50")
_PLAIN = "plain PyTorch"
_SAVED = ", saved"  # suffix for a loop that also saves checkpoints
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Loop:
    """A training loop to be timed."""

    take: Callable[[int], None]
    """Run a number of steps."""
    settle: Callable[[], None]
    """Wait for work that the steps have started: on the GPU, and checkpoints being written."""
    stood: CheckpointStalls | None = None
    """Times of its checkpoints; None if the loop saves none."""


@dataclass(frozen=True)
class StepTime:
    """Step time of one loop in seconds: the median, fastest and slowest of its blocks."""

    loop: str
    """Name of the loop: ``plain PyTorch``, which a user would write, ``nn.DataParallel, N GPUs``, or ``ours,`` and the
    engine; ``, saved`` follows where it also saves checkpoints."""
    step_s: float
    """Step time, the median of its blocks."""
    step_s_min: float
    """That of the fastest block."""
    step_s_max: float
    """That of the slowest block."""
    images_per_s: float
    """Images a second at the median step time."""
    ratio_to_plain: float
    """Ratio of step times to the plain loop: the median over rounds.

    DataParallel's step has as many images on each GPU as the plain loop's on one.
    """
    host_s: float | None
    """Time until the host has enqueued a step on the GPU: the median over the blocks' first steps.

    None without a GPU.
    """
    warmup_s: float
    """Time of the first two steps, including compilation.

    Code that an earlier loop has compiled is not compiled again.
    """
    ratio_to_unsaved: float | None = None
    """Ratio of step times to the same loop without checkpoints: the median over rounds.

    This and the following fields are None for a loop that saves none.
    """
    stood_s: float | None = None
    """Median time for which a checkpoint blocked the training thread, including the copy to host memory."""
    copied_s: float | None = None
    """Median time of that copy alone."""
    waited_s: float | None = None
    """Longest time that a checkpoint waited for the previous one; part of the time that it blocked the thread."""

    @property
    def unsaved_loop(self) -> str | None:
        """Name of the same loop without checkpoints; None for a loop that saves none."""
        return None if self.ratio_to_unsaved is None else self.loop.removesuffix(_SAVED)


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
    if model not in _NETWORKS:
        raise UserError(f"--model {model} is not known; write {', '.join(_NETWORKS[:-1])} or {_NETWORKS[-1]}")
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
    world = alone()
    steps = checkpoint_every or steps
    with ExitStack() as until_then:
        show = until_then.enter_context(measurement_bar())
        until_then.callback(dist.destroy_process_group)
        loops = {_PLAIN: _plain(recipe, world)}
        images = {}
        if no_data_parallel(recipe) is None:
            gpus = torch.cuda.device_count()
            wide = recipe.model_copy(update={"global_batch": gpus * recipe.global_batch})
            name = f"nn.DataParallel, {gpus} GPUs"
            loops[name], images[name] = _plain(wide, world, gpus), wide.global_batch
        for variant in engines:
            name = f"ours, {variant.sync.kind}"
            loops[name] = _ours(variant, world)
            if checkpoint_every is not None:
                loops[name + _SAVED] = until_then.enter_context(_ours_saved(variant, world, checkpoint_every))
        blocks: dict[str, list[float]] = {name: [] for name in loops}
        enqueued: dict[str, list[float]] = {name: [] for name in loops}
        warmups: dict[str, float] = {}
        for name, loop in loops.items():
            show(f"first steps of {name}", 0, rounds)
            warmups[name] = _seconds(loop, _WARMUP_STEPS)[1]
        for turn in range(rounds):
            show(f"round {turn + 1} of {rounds}", turn, rounds)
            order = list(loops) if turn % 2 else list(reversed(loops))
            for name in order:
                host_s, block_s = _seconds(loops[name], steps)
                enqueued[name].append(host_s)
                blocks[name].append(block_s / steps)
    return [
        StepTime(
            name, median(times), min(times), max(times), images.get(name, recipe.global_batch) / median(times),
            _ratio(times, blocks[_PLAIN]), median(enqueued[name]) if world.device.type == "cuda" else None,
            warmups[name], *_saved(loops[name].stood, times, blocks[name.removesuffix(_SAVED)]),
        )
        for name, times in blocks.items()
    ]  # fmt: skip


def _ratio(times: list[float], to: list[float]) -> float:
    """Return the median over rounds of the ratio of ``times`` to ``to``."""
    return median(ours / theirs for ours, theirs in zip(times, to, strict=True))


def _saved(stood: CheckpointStalls | None, times: list[float], unsaved: list[float]) -> tuple[float | None, ...]:
    """Return the last four fields of a ``StepTime``."""
    if stood is None:
        return (None,) * 4
    return _ratio(times, unsaved), median(stood.all_s), median(stood.copied_s), max(stood.waited_s)


def no_data_parallel(recipe: Recipe) -> str | None:
    """Return the reason why ``nn.DataParallel`` is not timed here, as a message; None if it is timed."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        there = "is one" if gpus else "are none"
        return f"nn.DataParallel was skipped: it spreads a batch over GPUs, and of them there {there}"
    if recipe.compile:
        return "nn.DataParallel was skipped: it copies the model in every step, and blocks are compiled for one copy"
    return None


def over_gpus(model: nn.Module, precision: Precision, gpus: int) -> nn.Module:
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


def alone() -> DistContext:
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


def _ours(recipe: Recipe, world: DistContext) -> Loop:
    """Build our training loop."""
    return Loop(_taking(recipe, world, our_step(recipe, world)), partial(_settle, world.device))


@contextmanager
def _ours_saved(recipe: Recipe, world: DistContext, every_steps: int) -> Iterator[Loop]:
    """Build our training loop, with checkpoints in a temporary directory."""
    take_step = our_step(recipe, world)
    with (
        TemporaryDirectory(prefix="bench-step-") as folder,
        closing(Saving(recipe, world, take_step.state, Path(folder), every_steps, _WARMUP_STEPS)) as saving,
    ):

        def settle() -> None:
            _settle(world.device)
            saving.settle()

        yield Loop(_taking(recipe, world, take_step, saving), settle, saving.stood)


def our_step(recipe: Recipe, world: DistContext) -> TrainingStep:
    """Build our training step for a recipe from ``step_recipe``, with fresh weights."""
    recipe = recipe.model_copy(update={"nonfinite_steps": 0})  # non-finite losses do not end the benchmark
    assert isinstance(recipe.data, SyntheticData)
    return build_step(
        recipe, split_batch(recipe, 1), build_initial_model(recipe, recipe.data.classes, world), world, 64
    )


def _taking(
    recipe: Recipe, world: DistContext, take_step: TrainingStep, saving: Saving | None = None
) -> Callable[[int], None]:
    """Return a function that runs a number of steps, with metrics as in a run."""
    batches = synthetic_batches(recipe, world.device)
    record = MetricLogger(Clock().run_s)
    done = 0

    def take(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            take_step(batches, recipe.optim.lr)
            done += 1
            if done % recipe.log_every == 0:
                take_step.meter.report(record, done, 1, recipe.optim.lr)
            if saving is not None:
                saving(take_step.state)

    return take


def _plain(recipe: Recipe, world: DistContext, gpus: int = 1) -> Loop:
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
    forward = over_gpus(model, recipe.precision, gpus) if gpus > 1 else model
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    cast = autocast(recipe.precision, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=isinstance(recipe.precision, Float16))
    batches = synthetic_batches(recipe, world.device)
    done = 0

    def take(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            images, labels = next(batches)
            with cast:
                loss = criterion(forward(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            done += 1
            if done % recipe.log_every == 0:
                loss.item()

    return Loop(take, partial(_settle, world.device))


def _seconds(loop: Loop, steps: int) -> tuple[float, float]:
    """Return the seconds until the host has finished the first of ``steps`` steps, and until all are done."""
    loop.settle()
    begun = time.perf_counter()
    loop.take(1)
    host_s = time.perf_counter() - begun
    loop.take(steps - 1)
    loop.settle()
    return host_s, time.perf_counter() - begun


def _settle(device: torch.device) -> None:
    """Wait for the GPU, if ``device`` is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
