"""A job trained on ranks that are here already."""

from __future__ import annotations

from collections.abc import Sequence

from imagenet_fast.data.loaders import open_dataset
from imagenet_fast.distributed.init import World
from imagenet_fast.metrics import Outcome, Record, Sink
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.models.weights import Weights, write_weights
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.train_loop import initial_model, train
from imagenet_fast.training.train_step import build_step


def train_job(job: Job, world: World, weights: Weights | None = None, sinks: Sequence[Sink] = ()) -> Outcome:
    """To its end, without checkpoints; leaves the final weights in its folder."""
    recipe, batching = job.recipe, job.batching
    dataset = open_dataset(recipe.data, job.data, batching, world.rank, world.cores, world.device, recipe.seed)
    model = initial_model(recipe, dataset.classes, world, weights)
    take_step = build_step(recipe, batching, model, world, dataset.train_order.steps_per_epoch)
    state = take_step.state
    train(job, dataset, world, take_step, Record(state.clock.run_s, sinks), lambda state, evaluated: False)
    if world.leads:
        write_weights(state.whole().state_dict(), job.folder / FINAL_WEIGHTS, {})
    state.sync.close()
    return state.outcome
