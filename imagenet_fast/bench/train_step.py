"""Compare our training step with a plain PyTorch loop: same model, precision, optimizer and data, one process.

Blocks of steps are timed in interleaved rounds. Each block is compared with the plain loop's block of the same round.
On a GPU each loop can be timed a second time, its steps replayed from a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from imagenet_fast.data.build import synthetic_images
from imagenet_fast.data.device import Normalizer
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.distributed.init import DistContext, computes_bf16, prepare_device
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.models import compile_blocks
from imagenet_fast.netlab.timing import in_turns
from imagenet_fast.progress import measurement_bar
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.schema import Float16, Recipe
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.optimizers import split_parameters
from imagenet_fast.training.precision import autocast, forward_dtype, set_float32_math
from imagenet_fast.training.train_step import TrainingStep, build_step

Batches = Iterator[tuple[Tensor, Tensor]]
Loop = Callable[[], bool]
"""Does one step, and tells whether that was replayed from a CUDA graph."""

_PLAIN, _REPLAYED = "plain PyTorch", ", replayed"
_WARMUP_STEPS = 2
_REPLAYED_AFTER = 12
"""Steps after which a loop that can be replayed is: engines plan and time some, three are launched, one is compared."""


@dataclass(frozen=True)
class _Block:
    """Some steps in a row."""

    host_s: float
    """Seconds until the host has finished the first one."""
    seconds: float
    """Until all are done."""
    replayed: int


def _block(step: Loop, steps: int) -> _Block:
    _synchronize()
    begun = time.perf_counter()
    replayed = int(step())
    host_s = time.perf_counter() - begun
    for _ in range(steps - 1):
        replayed += step()
    _synchronize()
    return _Block(host_s, time.perf_counter() - begun, replayed)


def _synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class StepTime(Row):
    """Step time of one loop in seconds: the median, fastest and slowest of its blocks."""

    note = "vs plain: time of a step, divided by the plain loop's."

    loop: str = field(metadata=column("loop"))
    """Name of the loop: ``plain PyTorch``, which a user would write, or ``ours,`` and the engine.

    ``replayed`` behind it: its steps come from a CUDA graph.
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

    Args:
        model: Name of the model.
        image_size: Side of the images in pixels.
        batch: Images per step.
        precision: Name of the precision; None: that in which recipes with bf16 train on this node.
        compiled: Whether to compile the model's blocks.
        sync: Name of the engine.

    Raises:
        UserError: A name is unknown.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return parse_recipe(
        "bench step",
        {
            "ranks": 1, "global_batch": batch, "epochs": 1, "log_every": 10, "compile": compiled, "graph": False,
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


def bench_step(
    recipe: Recipe, engines: list[Recipe], rounds: int, steps: int, replayed: bool = False
) -> list[StepTime]:
    """Time blocks of steps of each loop on one rank.

    Args:
        recipe: The recipe; the plain loop uses all but its ``[sync]`` table.
        engines: The recipe with different ``[sync]`` tables.
        rounds: Number of rounds; each times one block of every loop.
        steps: Steps in each block.
        replayed: Whether to time each loop that a CUDA graph can hold replayed from one, too.

    Raises:
        UserError: Steps are to be replayed, and there is no GPU.
    """
    if replayed and not torch.cuda.is_available():
        raise UserError("--graph replays steps from CUDA graphs, and there is no GPU; leave it out")
    world = single_rank_world()
    try:
        loops = {_PLAIN: _plain_loop(recipe, world)}
        loops |= {f"ours, {variant.sync.kind}": _our_loop(variant, world) for variant in engines}
        if replayed:
            if not isinstance(recipe.precision, Float16):  # whose GradScaler asks the GPU in each step
                loops[f"{_PLAIN}{_REPLAYED}"] = _plain_loop(recipe, world, replayed=True)
            for variant in engines:
                if not variant.unreplayable:
                    graphed = variant.model_copy(update={"graph": True})
                    loops[f"ours, {variant.sync.kind}{_REPLAYED}"] = _our_loop(graphed, world)

        def warm_up(name: str) -> float:
            return _block(loops[name], _REPLAYED_AFTER if name.endswith(_REPLAYED) else _WARMUP_STEPS).seconds

        with measurement_bar() as show:
            warmups = in_turns(list(loops), 1, warm_up, show)
            blocks = in_turns(list(loops), rounds, lambda name: _block(loops[name], steps), show)
    finally:
        dist.destroy_process_group()
    times = {name: [block.seconds / steps for block in of_loop] for name, of_loop in blocks.items()}

    def row(name: str) -> StepTime:
        own = times[name]
        # Of each round, so that a slow phase of the node slows both.
        ratio = median(ours_s / plain_s for ours_s, plain_s in zip(own, times[_PLAIN], strict=True))
        on_gpu = world.device.type == "cuda"
        return StepTime(
            name, median(own), min(own), max(own), recipe.global_batch / median(own), ratio,
            median(block.host_s for block in blocks[name]) if on_gpu else None,
            sum(block.replayed for block in blocks[name]) if on_gpu else None,
            warmups[name][0],
        )  # fmt: skip

    return list(map(row, loops))


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


def _our_loop(recipe: Recipe, world: DistContext) -> Loop:
    """Build our training loop, with metrics as in a run."""
    take_step = our_step(recipe, world)
    batches = synthetic_batches(recipe, world.device)
    record = MetricLogger(Clock().run_s)
    numbers = count(1)

    def replays() -> int:
        return 0 if take_step.graphs is None else take_step.graphs.replays

    def step() -> bool:
        before = replays()
        take_step(batches, recipe.optim.lr)
        if take_step.news and not (told := take_step.news.pop())["replayed"]:
            warn(f"steps of {recipe.sync.kind} are launched, not replayed: {told['why']}")
        if (done := next(numbers)) % recipe.log_every == 0:
            take_step.meter.report(record, done, 1, recipe.optim.lr)
        return replays() > before

    return step


def _plain_loop(recipe: Recipe, world: DistContext, replayed: bool = False) -> Loop:
    """Build the loop that a user would write by hand.

    It has forward, backward, fused ``torch.optim.SGD``, a loss read at every log line, and torch's ``GradScaler`` for
    fp16. ``replayed``: from a CUDA graph after the first steps.
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
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    cast = autocast(recipe.precision, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=isinstance(recipe.precision, Float16))
    batches = synthetic_batches(recipe, world.device)
    numbers = count(1)

    def train_on(images: Tensor, labels: Tensor) -> Tensor:
        with cast:
            loss: Tensor = criterion(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    take_step = _captured(train_on) if replayed else train_on

    def step() -> bool:
        loss = take_step(*next(batches))
        if (done := next(numbers)) % recipe.log_every == 0:
            loss.item()
        return replayed and done >= _REPLAYED_AFTER

    return step


def _captured(train_on: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a step that is launched at first, then captured in a CUDA graph and replayed."""
    graph, numbers = torch.cuda.CUDAGraph(), count(1)
    kept: list[Tensor] = []  # images, labels and loss of the graph

    def step(*batch: Tensor) -> Tensor:
        if not kept and next(numbers) < _REPLAYED_AFTER:
            return train_on(*batch)
        if not kept:
            kept.extend(values.clone() for values in batch)
            with torch.cuda.graph(graph):
                kept.append(train_on(*kept))
        for place, values in zip(kept, batch, strict=False):
            place.copy_(values)
        graph.replay()
        return kept[-1]

    return step
