"""A job trained on ranks that are here already."""

from __future__ import annotations

from collections.abc import Sequence

from imagenet_fast.data.loaders import build_loaders
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.metrics import MetricLogger, RunResult, Sink
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.models.weights import Weights, write_weights
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.train_loop import build_initial_model, train
from imagenet_fast.training.train_step import build_step


def train_job(job: Job, world: DistContext, weights: Weights | None = None, sinks: Sequence[Sink] = ()) -> RunResult:
    """To its end, without checkpoints; leaves the final weights in its folder."""
    recipe, batching = job.recipe, job.batching
    dataset = build_loaders(recipe.data, job.data, batching, world.rank, world.cores, world.device, recipe.seed)
    model = build_initial_model(recipe, dataset.classes, world, weights)
    take_step = build_step(recipe, batching, model, world, dataset.train_order.steps_per_epoch)
    state = take_step.state
    train(job, dataset, world, take_step, MetricLogger(state.clock.run_s, sinks), lambda state, evaluated: False)
    if world.is_main:
        write_weights(state.whole().state_dict(), job.folder / FINAL_WEIGHTS, {})
    state.sync.close()
    return state.outcome
