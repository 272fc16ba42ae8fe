"""What our training step costs beside a plain PyTorch loop: same model, precision, optimiser and data, one process.

Where there are several GPUs, ``nn.DataParallel`` spreads that loop over them, as many images on each.

Blocks of steps are timed in turn, so that both meet the same noise. Each block is compared with the plain loop's of
the same round, and the median of these ratios is reported: a machine that slows down slows both.

What checkpoints cost is measured in the same way: a loop that saves its state, beside the same one that does not. Its
block is not over until what was saved in it is on the disk, so that no other loop's block meets its writing.
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
from rich.table import Table
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from imagenet_fast.bench.checkpoint_overhead import Saving, Stood
from imagenet_fast.data.normalize import Normalizer
from imagenet_fast.data.sampler import TrainSampler
from imagenet_fast.data.synthetic import SyntheticLoader
from imagenet_fast.distributed.init import DistContext, prepare_device
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.models import compile_blocks
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Float16, Precision, Recipe, Sgd
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.optimizers import split_parameters
from imagenet_fast.training.precision import autocast, forward_dtype, set_float32_math
from imagenet_fast.training.train_loop import build_initial_model
from imagenet_fast.training.train_step import TrainingStep, build_step

Batches = Iterator[tuple[Tensor, Tensor]]

_PLAIN = "plain PyTorch"
_SAVED = ", saved"  # after the name of a loop that is the same otherwise
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Loop:
    """What takes so many steps, and waits for what they have left to others."""

    take: Callable[[int], None]
    settle: Callable[[], None]
    stood: Stood | None = None
    """Of a loop that saves checkpoints."""


@dataclass(frozen=True)
class StepTime:
    """Seconds a step of one loop: the median, fastest and slowest of its blocks."""

    loop: str
    step_s: float
    step_s_min: float
    step_s_max: float
    images_per_s: float
    ratio_to_plain: float
    """Of the time a step, the median over rounds. DataParallel's step has as many images on each GPU."""
    host_s: float | None
    """Until the host has enqueued a step that a GPU computes: the median of the blocks' first. None without a GPU."""
    warmup_s: float
    """The first two steps, with what they compile; what the loop before it has compiled is not compiled again."""
    ratio_to_unsaved: float | None = None
    """Of the time a step of a loop that saves checkpoints, to that of the same loop without: the median over rounds."""
    stood_s: float | None = None
    """For which a checkpoint held the training thread, the copy to host memory included: the median."""
    copied_s: float | None = None
    """That copy alone: the median."""
    waited_s: float | None = None
    """The longest that one checkpoint had to wait for the one before it, part of its ``stood_s``."""


def step_recipe(model: str, image_size: int, batch: int, precision: str, compiled: bool, sync: str = "lazy") -> Recipe:
    """A recipe of synthetic images, trained by SGD with momentum. Raises UserError where a name is unknown."""
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
    """Time ``steps`` steps of each loop in each of ``rounds`` rounds, on one rank.

    ``engines`` are the recipe with different ``[sync]`` tables; the plain loop reads the rest of ``recipe``, and so
    does DataParallel's, unless :func:`no_data_parallel` says why not. With ``checkpoint_every`` each engine is timed
    once more, saving its whole state every so many steps into a temporary directory; every block has so many steps
    then, instead of ``steps``.
    """
    world = alone()
    steps = checkpoint_every or steps
    with ExitStack() as until_then:
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
        warmups = {name: _seconds(loop, _WARMUP_STEPS)[1] for name, loop in loops.items()}
        for turn in range(rounds):
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
    return median(ours / theirs for ours, theirs in zip(times, to, strict=True))


def _saved(stood: Stood | None, times: list[float], unsaved: list[float]) -> tuple[float | None, ...]:
    """The last four figures of a row."""
    if stood is None:
        return (None,) * 4
    return _ratio(times, unsaved), median(stood.all_s), median(stood.copied_s), max(stood.waited_s)


def no_data_parallel(recipe: Recipe) -> str | None:
    """Why ``nn.DataParallel`` is not timed here, in a sentence; None: it is."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        there = "is one" if gpus else "are none"
        return f"nn.DataParallel was skipped: it spreads a batch over GPUs, and of them there {there}"
    if recipe.compile:
        return "nn.DataParallel was skipped: it copies the model in every step, and blocks are compiled for one copy"
    return None


def over_gpus(model: nn.Module, precision: Precision, gpus: int) -> nn.Module:
    """``model``, which lies on the first GPU, with each batch divided over the first ``gpus``; logits come back to the
    first. On a machine without any, DataParallel is the model itself."""
    return nn.DataParallel(_Cast(model, precision), list(range(gpus)))


class _Cast(nn.Module):
    """A forward that autocasts by itself: DataParallel's threads know that their caller does, not to which dtype."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, images: Tensor) -> Tensor:
        with autocast(self.precision, images.device):
            logits: Tensor = self.model(images)
        return logits


def step_table(times: list[StepTime]) -> Table:
    """One row a loop."""
    return compact_table(
        ("loop",),
        ("ms a step", "fastest", "slowest", "host's", "img/s", "vs plain", "warm-up"),
        (
            (t.loop, *(_milliseconds(s) for s in (t.step_s, t.step_s_min, t.step_s_max, t.host_s)),
             f"{t.images_per_s:.0f}", f"{100 * (t.ratio_to_plain - 1):+.2f} %", f"{t.warmup_s:.1f} s")
            for t in times
        ),
    )  # fmt: skip


def checkpoint_table(times: list[StepTime]) -> Table:
    """One row a loop that saves checkpoints: images a second without and with them, what they cost of these by the
    rounds' median, for how long one held the training thread, and the longest that one waited for the one before."""
    unsaved = {t.loop + _SAVED: t.images_per_s for t in times}
    return compact_table(
        ("loop",),
        ("img/s", "saving", "cost", "ms stood", "of it copy", "most waited"),
        (
            (t.loop.removesuffix(_SAVED), f"{unsaved[t.loop]:.1f}", f"{t.images_per_s:.1f}",
             f"{100 * (1 - 1 / t.ratio_to_unsaved):.2f} %",
             *(_milliseconds(s) for s in (t.stood_s, t.copied_s, t.waited_s)))
            for t in times if t.ratio_to_unsaved is not None
        ),
    )  # fmt: skip


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds, ".1f")


def alone() -> DistContext:
    """The world of one rank, on the GPU where there is one."""
    device, backend = prepare_device(0)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return DistContext(0, 1, 0, 1, device)


def synthetic_batches(recipe: Recipe, device: torch.device) -> Batches:
    """Those of a recipe of :func:`step_recipe`, normalised, without end."""
    assert isinstance(recipe.data, SyntheticData)
    order = TrainSampler(recipe.data.train_images, split_batch(recipe, 1), 0, recipe.seed)
    images = SyntheticLoader(order, recipe.data, device, recipe.seed)
    return iter(Normalizer(images, recipe.data, device, forward_dtype(recipe.precision)))


def _ours(recipe: Recipe, world: DistContext) -> Loop:
    return Loop(_taking(recipe, world, our_step(recipe, world)), partial(_settle, world.device))


@contextmanager
def _ours_saved(recipe: Recipe, world: DistContext, every_steps: int) -> Iterator[Loop]:
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
    """A step of a recipe of :func:`step_recipe`, with fresh weights."""
    recipe = recipe.model_copy(update={"nonfinite_steps": 0})  # steps are timed, whatever they learn
    assert isinstance(recipe.data, SyntheticData)
    return build_step(
        recipe, split_batch(recipe, 1), build_initial_model(recipe, recipe.data.classes, world), world, 64
    )


def _taking(
    recipe: Recipe, world: DistContext, take_step: TrainingStep, saving: Saving | None = None
) -> Callable[[int], None]:
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
    """What one would write by hand: forward, backward, ``torch.optim.SGD`` in its fused form, a loss every log line;
    torch's ``GradScaler`` for fp16. With several ``gpus`` that batch divided over them."""
    assert isinstance(recipe.data, SyntheticData)
    assert isinstance(recipe.optim, Sgd)
    set_float32_math(recipe.precision)
    model = build_initial_model(recipe, recipe.data.classes, world)
    if recipe.compile:
        compile_blocks(model)
    decayed, plain = split_parameters(model, recipe.optim)
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
    """Until the host is through with the first of ``steps`` steps, and until all are done."""
    loop.settle()
    begun = time.perf_counter()
    loop.take(1)
    host_s = time.perf_counter() - begun
    loop.take(steps - 1)
    loop.settle()
    return host_s, time.perf_counter() - begun


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
