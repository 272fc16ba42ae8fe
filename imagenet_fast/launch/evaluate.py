"""One rank of an evaluation, from its job to the result, which rank 0 prints."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from imagenet_fast.data.fingerprint import compare_data, contents
from imagenet_fast.data.loaders import open_validation
from imagenet_fast.distributed.init import DistContext, init_distributed
from imagenet_fast.distributed.ranks import RankInfo, set_group_rank
from imagenet_fast.distributed.reductions import first_of_node
from imagenet_fast.launch.signals import end_on_signals
from imagenet_fast.metrics.json_io import write_json
from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.models import compile_blocks
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.training.evaluation import evaluate
from imagenet_fast.training.init_weights import build_initial_model, load_initial_weights
from imagenet_fast.training.precision import autocast, effective_precision, forward_dtype, set_float32_math


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation: accuracies in percent of ``images``.

    Those with ``_mirror`` are by the mean logits of each image and its mirror image, and those with ``_shift`` by
    those of shifted images, too; None if not measured.
    ``eval_s`` is the time from the first image to the last in seconds, with compilation included.
    """

    weights: str
    recipe: str
    model: str
    precision: str
    world_size: int
    top1: float
    top5: float
    images: int
    eval_s: float
    images_per_s: float
    top1_mirror: float | None = None
    top5_mirror: float | None = None
    top1_shift: float | None = None
    top5_shift: float | None = None


def evaluate_as_rank(evaluation: Evaluation, place: RankInfo, join_timeout_s: float, left: Path | None = None) -> None:
    """Join the other ranks and evaluate; rank 0 prints the result, and writes it to ``evaluation.report`` if given.

    Args:
        evaluation: What to evaluate.
        place: This process's rank.
        join_timeout_s: Seconds to wait for the other ranks.
        left: Directory where each rank leaves its last position; None for nowhere.

    Raises:
        UserError: If the ranks cannot meet or were given different jobs, or the weights or images do not fit.
    """
    set_group_rank(place)
    end_on_signals()
    recipe, join_timeout = evaluation.recipe, timedelta(seconds=join_timeout_s)
    with init_distributed(
        place, evaluation.agreed(), join_timeout, recipe.timeout, left=left, numa_binding=recipe.numa_binding
    ) as world:
        verdict = judge(evaluation, world)
        if world.is_main:
            Console().print(verdict_table(verdict))
            if evaluation.report is not None:
                write_json(asdict(verdict), evaluation.report)


def judge(evaluation: Evaluation, world: DistContext) -> EvalResult:
    """Classify the whole validation set as training with the recipe does: with its model, precision and batches."""
    recipe = evaluation.recipe
    precision, note = effective_precision(recipe.precision, world.bf16)
    if world.is_main:
        print(note, end="")
    with first_of_node(world):
        images = open_validation(
            recipe.data, evaluation.data, evaluation.batching, world.rank, world.cores, world.device, recipe.seed,
            forward_dtype(precision), recipe.channels_last,
        )  # fmt: skip
    compare_data(contents(images.class_names, {"images": 0, "digest": ""}, images.val_contents), world)
    weights = load_initial_weights(
        evaluation.weights, recipe.model, images.classes, world, class_names=images.class_names, evaluates=True
    )
    set_float32_math(precision)
    model = build_initial_model(recipe, images.classes, world, weights)
    if recipe.compile and not recipe.ema_decay:  # the moving average is not compiled in training either
        compile_blocks(model)
    begun = time.perf_counter()
    accuracy = evaluate(
        model, images, autocast(precision, world.device), world, mirror=recipe.eval_mirror,
        shift=recipe.eval_shift,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    return EvalResult(
        weights.source if weights is not None else str(evaluation.weights), evaluation.name, recipe.model.label,
        precision.kind, world.size, accuracy.top1, accuracy.top5, accuracy.images, seconds,
        accuracy.images / seconds, **accuracy.averaged,
    )  # fmt: skip


def verdict_table(verdict: EvalResult) -> Table:
    """Return a table with one row for the result."""
    numbers = {"top-1 %": f"{verdict.top1:.2f}", "top-5 %": f"{verdict.top5:.2f}"}
    if verdict.top1_mirror is not None:
        numbers["mirror %"] = f"{verdict.top1_mirror:.2f}"
    if verdict.top1_shift is not None:
        numbers["shift %"] = f"{verdict.top1_shift:.2f}"
    numbers |= {"images": str(verdict.images), "img/s": f"{verdict.images_per_s:.0f}"}
    return compact_table(("recipe", "model"), list(numbers), [(verdict.recipe, verdict.model, *numbers.values())])
