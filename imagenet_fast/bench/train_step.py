"""Compare our training step with a plain PyTorch loop: same model, precision, optimizer and data, one process.

Blocks of steps are timed in interleaved rounds. Each block is compared with the plain loop's block of the same round.
On a GPU each loop can be timed a second time, its steps replayed from a CUDA graph. Our loops can be timed once more on
images that a loader reads meanwhile, and so can the loader alone; for each block it is opened, and closed after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from imagenet_fast.data import dali
from imagenet_fast.data.build import build_loaders
from imagenet_fast.data.device import Normalizer
from imagenet_fast.data.throughput import WARM_BATCHES, OwnLoader, images_to_time, stored_pixels, training_batches
from imagenet_fast.distributed.init import DistContext, computes_bf16, prepare_device
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.models import compile_blocks
from imagenet_fast.netlab.timing import in_turns
from imagenet_fast.progress import measurement_bar
from imagenet_fast.recipe.batching import check_norms, split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.schema import Float16, Recipe
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.optimizers import split_parameters
from imagenet_fast.training.precision import autocast, forward_dtype, set_float32_math
from imagenet_fast.training.step_graph import Batch
from imagenet_fast.training.training_step import build_step

Loop = Callable[[Iterator[Batch]], bool]
"""Does one step on the next batch, and returns whether it was replayed from a CUDA graph."""

_PLAIN, _REPLAYED = "plain PyTorch", ", replayed"
_WARMUP_STEPS = 2
_REPLAYED_AFTER = 12
"""Steps after which a loop that can be replayed is: engines plan and time some, three are launched, one is compared."""


class _Timed(NamedTuple):
    """A loop, where the batches of a block come from, and the number of steps before the block."""

    step: Loop
    batches: Callable[[], Iterator[Batch]]
    before: int = 0


def _block(loop: _Timed, steps: int, wait: Callable[[], object]) -> tuple[float, float, int]:
    """Return the seconds until the host has finished the first of ``steps`` steps, and until all are done.

    ``wait`` waits for the GPU, if there is one. The last value is how many steps were replayed.
    """
    batches = loop.batches()
    for _ in range(loop.before):
        loop.step(batches)
    wait()
    begun = time.perf_counter()
    replayed = int(loop.step(batches))
    host_s = time.perf_counter() - begun
    for _ in range(steps - 1):
        replayed += loop.step(batches)
    wait()
    return host_s, time.perf_counter() - begun, replayed


@dataclass(frozen=True)
class StepTime(Row):
    """Step time of one loop in seconds: the median, fastest and slowest of its blocks."""

    note = "vs: time of a step, divided by that of the plain loop, on synthetic images, or of the loader alone."

    loop: str = field(metadata=column("loop"))
    """Name of the loop: ``plain PyTorch``, which a user would write, or ``ours,`` and the engine.

    ``replayed`` behind it: its steps come from a CUDA graph. ``from`` a loader: it trains on that one's images, else on
    synthetic ones. The loader ``alone``: nothing is trained, and a step is to take a batch.
    """
    step_s: float = field(metadata=column("", "ms/step", ".1f"))
    """Step time, the median of its blocks."""
    step_s_min: float = field(metadata=column("fastest", "ms", ".1f"))
    """That of the fastest block."""
    step_s_max: float = field(metadata=column("slowest", "ms", ".1f"))
    """That of the slowest block."""
    images_per_s: float = field(metadata=column("img/s", form=".0f"))
    """Images a second at the median step time."""
    ratio_to_plain: float = field(metadata=column("vs plain", form=".4f"))
    """Ratio of step times to the plain loop: the median over rounds."""
    ratio_to_synthetic: float | None = field(metadata=column("vs synthetic", form=".4f"))
    """Ratio to the same loop on synthetic images, likewise: what the loader costs the step; None without a loader."""
    ratio_to_loader: float | None = field(metadata=column("vs loader", form=".4f"))
    """Ratio to the loader alone, likewise: how much slower images come when they are trained on; None without it."""
    host_s: float | None = field(metadata=column("host", "ms", ".1f"))
    """Time until the host has enqueued a step on the GPU: the median over the blocks' first steps.

    None without a GPU.
    """
    replayed: int | None = field(metadata=column("replayed"))
    """Number of timed steps that were replayed from a CUDA graph; None without a GPU."""
    warmup_s: float = field(metadata=column("warm-up", "s", ".1f"))
    """Time of the first steps, including compilation: two, or twelve of a loop that is replayed after them.

    Code that an earlier loop has compiled is not compiled again.
    """


def step_recipe(
    model: str, image_size: int, batch: int, precision: str | None, compiled: bool = False, sync: str = "lazy"
) -> Recipe:  # fmt: skip
    """Build a recipe of synthetic images, trained by SGD with momentum.

    Without ``precision``, it is the one in which recipes with bf16 train on this node. Raises UserError if a name is
    unknown, or as ``check_norms``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = parse_recipe(
        "bench step",
        {
            "reference_ranks": 1, "global_batch": batch, "epochs": 1, "log_every": 10, "compile": compiled,
            "graph": False, "nonfinite_steps": 0,  # non-finite losses do not end the benchmark
            "model": {"kind": model},
            "data": {
                "loader": "synthetic", "image_size": image_size, "classes": 1000,
                "train_images": 64 * batch, "val_images": batch,
            },
            "precision": {"kind": precision or ("bf16" if computes_bf16(device) else "fp32")},
            "optim": {"kind": "sgd", "lr": 0.01, "weight_decay": 5e-5},
            "schedule": {"kind": "cosine"},
            "sync": {"kind": sync},
        },
    )  # fmt: skip
    check_norms(recipe, batch)
    return recipe


def bench_step(
    variants: Sequence[Recipe], rounds: int, steps: int, replayed: bool = False, loader: OwnLoader | None = None,
    data: Path | None = None, workers: int | None = None,
) -> list[StepTime]:  # fmt: skip
    """Time blocks of so many ``steps`` of each loop on one rank, one of every loop in each round.

    The ``variants`` are a recipe with different ``[sync]`` tables; the plain loop uses none of these. Each loop that a
    CUDA graph can hold is timed ``replayed`` from one, too. A ``loader`` with ``workers`` threads is timed alone, and
    each of our loops on its images: those in ``data``, in any format, or temporary photos made here.

    Raises:
        UserError: Steps are to be replayed, and there is no GPU; or the loader, or enough images, are not there.
    """
    if replayed and not torch.cuda.is_available():
        raise UserError("--graph replays steps from CUDA graphs, and there is no GPU; leave it out")
    if loader == "dali" and not dali.is_installed():
        raise UserError("--loader dali needs DALI; `pip install nvidia-dali-cuda130`, or take --loader threads")
    recipe, classes = variants[0], 1000
    batch, size = recipe.global_batch, recipe.data.image_size
    device, backend = prepare_device(0)
    world = DistContext(0, 1, 0, 1, device, bf16=True)  # the precision that is asked for is measured, however slow
    with ExitStack() as opened:
        if loader is not None:
            images, _, folder = opened.enter_context(images_to_time(data, batch))
            images = stored_pixels(images, 2 * batch, size, folder) if loader == "pixels" else images
            classes = max(classes, len(images.classes))
            read = partial(training_batches, loader, images, size, batch, workers or world.cores, device)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        opened.callback(dist.destroy_process_group)
        wait = torch.get_device_module(device).synchronize
        dtype = forward_dtype(recipe.precision)
        normalise = Normalizer(recipe.data, device, dtype)
        synthetic = build_loaders(
            recipe.data, None, split_batch(recipe, 1), 0, world.cores, device, recipe.seed, dtype=dtype
        ).train

        def from_loader() -> Iterator[Batch]:
            return ((normalise(pixels), labels) for pixels, labels, _ in read())

        loops = {_PLAIN: _plain_loop(recipe, classes, world)}
        loops |= {f"ours, {variant.sync.kind}": _our_loop(variant, classes, world) for variant in variants}
        if replayed:
            graphed = [variant.model_copy(update={"graph": True}) for variant in variants]
            if not isinstance(graphed[0].precision, Float16):  # whose GradScaler asks the GPU in each step
                loops[f"{_PLAIN}{_REPLAYED}"] = _plain_loop(graphed[0], classes, world)
            own = [variant for variant in graphed if not variant.unreplayable]
            loops |= {f"ours, {variant.sync.kind}{_REPLAYED}": _our_loop(variant, classes, world) for variant in own}
        timed = {name: _Timed(loop, lambda: synthetic) for name, loop in loops.items()}
        if loader is not None:
            timed |= {
                f"{name}, from {loader}": _Timed(loop, from_loader, WARM_BATCHES)
                for name, loop in loops.items() if name.startswith("ours")
            }  # fmt: skip
            timed[f"{loader} alone"] = _Timed(lambda batches: not next(batches), from_loader, WARM_BATCHES)

        def warm_up(name: str) -> tuple[float, float, int]:
            return _block(timed[name], _REPLAYED_AFTER if name.endswith(_REPLAYED) else _WARMUP_STEPS, wait)

        with measurement_bar() as show:
            warmups = in_turns(list(timed), 1, warm_up, show)
            blocks = in_turns(list(timed), rounds, lambda name: _block(timed[name], steps, wait), show)
    times = {name: [block_s / steps for _, block_s, _ in of_loop] for name, of_loop in blocks.items()}
    on_gpu = device.type == "cuda"

    def ratio(name: str, other: str) -> float:
        """Compare blocks of each round, so that a slow phase of the node slows both."""
        return median(own_s / other_s for own_s, other_s in zip(times[name], times[other], strict=True))

    def row(name: str) -> StepTime:
        own, (launched_s, _, replays) = times[name], zip(*blocks[name], strict=True)
        synthetic, is_fed, _ = name.partition(", from ")
        return StepTime(
            name, median(own), min(own), max(own), batch / median(own), ratio(name, _PLAIN),
            ratio(name, synthetic) if is_fed else None, ratio(name, f"{loader} alone") if is_fed else None,
            median(launched_s) if on_gpu else None, sum(replays) if on_gpu else None, warmups[name][0][1],
        )  # fmt: skip

    return list(map(row, timed))


def _our_loop(recipe: Recipe, classes: int, world: DistContext) -> Loop:
    """Build our training loop, with metrics as in a run."""
    model = build_initial_model(recipe, classes, world)
    take_step = build_step(recipe, split_batch(recipe, 1), model, world, 64)
    record = MetricLogger(Clock().run_s)

    def step(batches: Iterator[Batch]) -> bool:
        before = take_step.graphs.replays if take_step.graphs is not None else 0
        take_step(batches, recipe.optim.lr)
        if take_step.news and not (told := take_step.news.pop())["replayed"]:
            warn(f"steps of {recipe.sync.kind} are launched, not replayed: {told['why']}")
        if (done := take_step.state.step) % recipe.log_every == 0:
            take_step.meter.report(record, done, 1, recipe.optim.lr)
        return take_step.graphs is not None and take_step.graphs.replays > before

    return step


def _plain_loop(recipe: Recipe, classes: int, world: DistContext) -> Loop:
    """Build the loop that a user would write by hand.

    It has forward, backward, fused ``torch.optim.SGD``, a loss read at every log line, and torch's ``GradScaler`` for
    fp16. With ``graph`` steps are replayed from a CUDA graph after the first ones.
    """
    assert isinstance(recipe.optim, Sgd)
    set_float32_math(recipe.precision)
    model = build_initial_model(recipe, classes, world)
    if recipe.compile:
        compile_blocks(model)
    decayed, plain = split_parameters(model)
    groups = [{"params": decayed, "weight_decay": recipe.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        groups, lr=recipe.optim.lr, momentum=recipe.optim.momentum, nesterov=recipe.optim.nesterov, fused=True
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    cast = autocast(recipe.precision, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=isinstance(recipe.precision, Float16))
    numbers = count(1)

    def train_on(batch: Batch) -> Tensor:
        images, labels = batch
        with cast:
            loss: Tensor = criterion(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    take_step: Callable[[Batch], Tensor] = train_on

    def step(batches: Iterator[Batch]) -> bool:
        nonlocal take_step
        batch, done = next(batches), next(numbers)
        if recipe.graph and done == _REPLAYED_AFTER:
            take_step = _captured(train_on, batch)
        loss = take_step(batch)
        if done % recipe.log_every == 0:
            loss.item()
        return recipe.graph and done >= _REPLAYED_AFTER

    return step


def _captured(train_on: Callable[[Batch], Tensor], batch: Batch) -> Callable[[Batch], Tensor]:
    """Capture a step on batches like ``batch`` in a CUDA graph, and return a step that replays it."""
    images, labels = (values.clone() for values in batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_on((images, labels))

    def replay(batch: Batch) -> Tensor:
        images.copy_(batch[0])
        labels.copy_(batch[1])
        graph.replay()
        return loss

    return replay
