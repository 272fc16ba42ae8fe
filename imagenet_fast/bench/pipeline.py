"""Measure the cost of each pipeline schedule: its bubble, images per second, and on GPUs its memory.

The bubble is the share of time in which ranks wait for each other. It is measured with stages that sleep instead of
computing, so that a few cores can run any number of them. Memory and images per second are measured with the model
itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.bench.layer_profiler import model_and_batch
from imagenet_fast.bench.replay import Pace, Replayed
from imagenet_fast.cost_model.layer_profile import shipped_profile
from imagenet_fast.distributed.device_timer import record_timestamp, seconds_between
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.models import build_model
from imagenet_fast.models.stages import split_model
from imagenet_fast.netlab.forks import report_progress
from imagenet_fast.netlab.ranks import Lab, on_gpus
from imagenet_fast.parallel.pipeline_parallel import Pass, Pipeline
from imagenet_fast.recipe.batching import check_norms
from imagenet_fast.recipe.parallel_config import chunks_of, misfit
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.precision import autocast


@dataclass(frozen=True)
class Busy:
    """One pass of a micro-batch through a stage; times are in seconds since the start of the step."""

    stage: int
    which: Pass
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineTime(Row):
    """One schedule with one number of micro-batches.

    Figures of sleeping stages are from the round with the median step time.
    """

    model: str
    """The model that was cut."""
    schedule: str = field(metadata=column("schedule"))
    """Order of forwards and backwards."""
    stages: int
    """Number of ranks; with ``interleaved``, each has two stages of half the length."""
    micro_batches: int = field(metadata=column("micro-batches"))
    """Micro-batches of a step."""
    step_s: float
    """Step time of sleeping stages."""
    bubble: float = field(metadata=column("bubble", form=".2f"))
    """Share of ``step_s`` in which a rank did not sleep, as a mean over the ranks."""
    expected_bubble: float = field(metadata=column("by formula", form=".2f"))
    """(p-1)/(m+p-1) for p equal stages and m micro-batches.

    With v stages per rank, it is (p-1)/(vm+p-1).
    """
    images_per_s: float = field(metadata=column("img/s", form=".0f"))
    """Images per second of the model itself, forward and backward."""
    activation_bytes: tuple[int, ...] | None = field(metadata=column("kept by each rank", "MB", ".0f"))
    """Peak of all memory that a step allocates on each rank's GPU; None on CPUs."""
    timeline: tuple[Busy, ...]
    """Passes of all ranks in that step."""

    @property
    def title(self) -> str:
        """Name the model and the number of ranks."""
        return f"{self.model}, {self.stages} ranks in a pipeline"


_Measured = tuple[list[tuple[float, list[Busy]]], list[float], int]
"""One schedule and number of micro-batches on one rank: by round, seconds per step and passes of sleeping stages; by
round, seconds per step of the model itself; and the peak bytes that its steps allocated on a GPU, 0 on a CPU."""


def bench_pipeline(
    recipe: Recipe,
    stages: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str],
    sleep_s: float,
    device: str | None,
    rounds: int,
) -> list[PipelineTime]:
    """Measure every schedule with every number of micro-batches that it can take, on so many ranks of this node.

    A rank sleeps ``sleep_s`` seconds for a micro-batch's forward, and twice that for its backward. None for the
    ``device`` means "cuda" if there is a GPU for each rank, else "cpu".

    Raises:
        UserError: Nothing can be measured.
    """
    uneven = [count for count in micro_batches if recipe.global_batch % count]
    if uneven:
        raise UserError(
            f"--batch {recipe.global_batch} does not make {uneven[0]} equal micro-batches; take a multiple of "
            f"{lcm(*micro_batches)}"
        )
    runs: list[tuple[str, int]] = []
    for schedule in schedules:
        refused = {count: misfit(schedule, stages, count) for count in micro_batches}
        if None not in refused.values():
            raise UserError(f"--schedules: {refused[micro_batches[0]]}")
        runs += [(schedule, count) for count, why in refused.items() if why is None]
    size, smallest = recipe.data.image_size, recipe.global_batch // max(micro_batches)
    check_norms(recipe, smallest)
    with torch.device("meta"):  # refuse an impossible split here, not on a rank
        split_model(
            build_model(recipe.model, classes=1), torch.empty(smallest, 3, size, size), 0, stages,
            max(map(chunks_of, schedules)),
        )  # fmt: skip
    gpus = on_gpus(device, stages, "stages", "--stages")
    by_rank: list[list[_Measured]] = Lab(1, stages).run(_measure, recipe, runs, sleep_s, rounds, gpus, gpus=gpus)
    return [
        _row(recipe, stages, *run, of_ranks) for run, of_ranks in zip(runs, zip(*by_rank, strict=True), strict=True)
    ]


def _row(recipe: Recipe, stages: int, schedule: str, micro_batches: int, of_ranks: Sequence[_Measured]) -> PipelineTime:
    """Summarise one run from the measurements of all ranks; the slowest rank counts."""
    slept_by_rank, computed_by_rank, kept = zip(*of_ranks, strict=True)
    slept = sorted(
        (max(step_s for step_s, _ in of_round), turn, [busy for _, own in of_round for busy in own])
        for turn, of_round in enumerate(zip(*slept_by_rank, strict=True))
    )
    step_s, _, timeline = slept[(len(slept) - 1) // 2]
    busy_s = sum(busy.end_s - busy.begin_s for busy in timeline) / stages
    slowest = [max(of_round) for of_round in zip(*computed_by_rank, strict=True)]
    return PipelineTime(
        recipe.model.kind, schedule, stages, micro_batches, step_s, 1 - busy_s / step_s,
        (stages - 1) / (chunks_of(schedule) * micro_batches + stages - 1),
        recipe.global_batch / median(slowest), kept if any(kept) else None, tuple(timeline),
    )  # fmt: skip


def _measure(
    recipe: Recipe, runs: Sequence[tuple[str, int]], sleep_s: float, rounds: int, gpus: bool
) -> list[_Measured]:
    """Measure every run; each rank calls it."""
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    model, images, labels = model_and_batch(recipe, device)
    profile = shipped_profile(recipe.model.kind)
    measured = []
    for number, (schedule, micro_batches) in enumerate(runs):
        report_progress(f"{schedule} with {micro_batches} micro-batches", number, len(runs))
        ranks, chunks = dist.get_world_size(), chunks_of(schedule)
        slept = _sleep(3 * sleep_s / chunks, schedule, micro_batches, rounds)
        cast = autocast(recipe.precision, device)
        with cast:
            part = split_model(model, images.chunk(micro_batches)[0], dist.get_rank(), ranks, chunks, profile)
        pipeline = Pipeline(part, None, schedule, micro_batches, nn.CrossEntropyLoss(), cast=cast)
        step = partial(_seconds, part, pipeline, images, labels)
        step()  # warm-up: connects ranks, and touches fresh memory
        before = torch.cuda.memory_allocated() if gpus else 0
        if gpus:
            torch.cuda.reset_peak_memory_stats()
        computed_s = [step() for _ in range(rounds)]
        kept = torch.cuda.max_memory_allocated() - before if gpus else 0
        measured.append((slept, computed_s, kept))
    return measured


def _sleep(stage_s: float, schedule: str, micro_batches: int, rounds: int) -> list[tuple[float, list[Busy]]]:
    """Time steps of sleeping stages; return seconds and this rank's passes, by round.

    A stage sleeps ``stage_s`` seconds for a micro-batch, a third of them in forward. This runs on the CPU with gloo
    even if there are GPUs: a GPU would not wait for a sleeping host.
    """
    pace = Pace()
    ranks, chunks = dist.get_world_size(), chunks_of(schedule)
    stages = (Replayed(pace, stage_s / 3, 2 * stage_s / 3, [torch.zeros(1)]) for _ in range(ranks * chunks))
    part = split_model(nn.Sequential(*stages), torch.zeros(1, 1), dist.get_rank(), ranks, chunks)
    passes: list[tuple[int, Pass, float, float]] = []

    @contextmanager
    def observe(which: Pass, stage: int) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        passes.append((stage, which, begun, time.perf_counter()))

    pipeline = Pipeline(part, None, schedule, micro_batches, lambda values, _: values.sum(), observe=observe)
    images = torch.zeros(micro_batches, 1)
    pipeline(images, images)  # warm-up: connects ranks
    slept = []
    for _ in range(rounds):
        dist.barrier()
        passes.clear()
        begun = time.perf_counter()
        pipeline(images, images)
        step_s = time.perf_counter() - begun
        slept.append((step_s, [Busy(stage, which, *(at - begun for at in times)) for stage, which, *times in passes]))
    return slept


def _seconds(part: nn.Module, pipeline: Pipeline, images: Tensor, labels: Tensor) -> float:
    """Run a step of this rank's part of the model, and return how long it takes."""
    dist.barrier()
    begun = record_timestamp(images.device)
    part.zero_grad()
    pipeline(images, labels)
    return seconds_between(begun, record_timestamp(images.device))
