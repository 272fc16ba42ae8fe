"""Run the training loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from imagenet_fast.data.loaders import Loaders
from imagenet_fast.data.rng import bits
from imagenet_fast.distributed.forkserver import freeze_gc
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import broadcast_model
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.models import build_model
from imagenet_fast.models.weights import Weights, fill
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.evaluation import Stopped, evaluate
from imagenet_fast.training.lr_schedule import learning_rate
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.train_step import TrainingStep


def train(
    job: Job, dataset: Loaders, world: DistContext, take_step: TrainingStep, record: MetricLogger,
    keep: Callable[[TrainState, bool | None], bool], asked: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Train from the state of ``take_step`` until the target is reached or the last epoch ends.

    The outcome in the state is kept up to date throughout.

    Args:
        job: The run and its recipe.
        dataset: Loaders of the training and validation images.
        world: This rank and its process group.
        take_step: The training step with its state.
        record: Logger of the run.
        keep: Called after every step with whether it was evaluated; returns whether to stop. It gets None if the
            evaluation was cut off because some rank was asked to stop; a resumed run then makes that evaluation first.
        asked: Returns whether some rank has been asked to stop.
    """
    recipe, batching, state, meter = job.recipe, job.batching, take_step.state, take_step.meter
    outcome, clock = state.outcome, state.clock
    steps_per_epoch = dataset.train_order.steps_per_epoch
    steps = recipe.epochs * steps_per_epoch
    record(
        "run", state.step, recipe=job.name, sync=recipe.sync.kind, world_size=world.size,
        global_batch=batching.global_batch, layout=recipe.parallel.layout(world.size), epochs=recipe.epochs,
        steps_per_epoch=steps_per_epoch, steps=steps, target_top1=recipe.target_top1,
        train_images=dataset.train_order.images, val_images=dataset.val_order.images, note=job.note,
    )  # fmt: skip

    def evaluated(epoch: int) -> bool | None:
        """Evaluate after ``epoch`` and return True; return None if it was cut off and nothing has changed."""
        here.enter("evaluation")
        state.settle()
        before = state.statistics()
        with clock.pause() as evaluation:
            freeze_gc()
            state.level_statistics()
            try:
                accuracy = evaluate(state.whole(), dataset, take_step.cast, world, asked)
            except Stopped:
                state.put_back(before)
                return None
        meter.restart()
        outcome.judge(accuracy.top1, accuracy.top5, clock.run_s())
        record(
            "eval", state.step, epoch=epoch, top1=accuracy.top1, top5=accuracy.top5, images=accuracy.images,
            eval_s=evaluation.seconds, train_s=clock.train_s(),
        )  # fmt: skip
        return True

    freeze_gc()
    clock.begin_training()
    meter.restart()
    stop = False
    judged: bool | None = False
    done, into = divmod(state.step, steps_per_epoch)
    if state.unjudged and done and into == 0 and recipe.evaluates_after(done):
        judged = evaluated(done)
        stop = keep(state, judged)
    while state.step < steps and outcome.status != "reached" and not stop:
        done, into = divmod(state.step, steps_per_epoch)
        epoch = done + 1
        if into == 0:
            record("epoch", state.step, epoch=epoch)
        lr = learning_rate(recipe.schedule, recipe.optim.lr, state.step, steps_per_epoch, recipe.epochs)
        seed_step(recipe.seed, state.step, world)
        take_step(dataset.train, lr)
        if state.step % recipe.log_every == 0:
            meter.report(record, state.step, epoch, lr)
        outcome.advance(epoch, state.step, clock.train_s(), state.sent_bytes)

        judged = False
        if into + 1 == steps_per_epoch and recipe.evaluates_after(epoch):
            meter.report(record, state.step, epoch, lr)
            meter.flush(record)
            outcome.advance(epoch, state.step, clock.train_s(), state.sent_bytes)
            judged = evaluated(epoch)
        stop = keep(state, judged)
    meter.flush(record)
    if outcome.status != "reached":
        outcome.status = "finished" if state.step == steps and judged is not None else "preempted"


def build_initial_model(recipe: Recipe, classes: int, world: DistContext, weights: Weights | None = None) -> nn.Module:
    """Build the recipe's model on this rank's device, with rank 0's weights on every rank.

    Args:
        recipe: The recipe.
        classes: Number of classes.
        world: This rank and its process group.
        weights: Result of ``load_initial_weights``; None on rank 0: fresh weights.
    """
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, classes)
    if weights is not None:
        fill(model, weights)
    model = model.to(world.device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    broadcast_model(model)
    return model


def seed_step(seed: int, step: int, world: DistContext) -> None:
    """Seed the generators of the CPU and of this rank's device by (seed, step, rank), as dropout uses them.

    A run resumed at a step so draws the same numbers as an uninterrupted one. Compiled code and replayed CUDA graphs
    use the same generators. The CPU's generator uses 32 bits of a seed, a GPU's all 64.
    """
    number = int(bits("step", seed, step, of=world.rank)[0])
    torch.default_generator.manual_seed(number)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(number)
