"""The training loop and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from imagenet_fast.data.dataset import Dataset
from imagenet_fast.models import build_model
from imagenet_fast.models.weights import Weights, describe, fill, write_weights
from imagenet_fast.ranks.agreement import average_batch_norms, same_everywhere
from imagenet_fast.ranks.garbage import exempt_what_lives
from imagenet_fast.ranks.world import World
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.record import Outcome, Record
from imagenet_fast.record.past_runs import FINAL_WEIGHTS
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.dropout import seed_step
from imagenet_fast.training.evaluation import evaluate
from imagenet_fast.training.schedule import learning_rate
from imagenet_fast.training.step import build_step


def train(
    job: Job, dataset: Dataset, world: World, clock: Clock, record: Record, outcome: Outcome,
    weights: Weights | None = None,
) -> None:  # fmt: skip
    """Train ``job`` until its target or its last epoch, from rank 0's ``weights`` if it has some; ``outcome`` is kept
    up to date all the way."""
    recipe, batching = job.recipe, job.batching
    model = initial_model(recipe, dataset.classes, world, weights)
    steps_per_epoch = dataset.train_order.steps_per_epoch
    trace = job.folder / "trace.json" if job.trace and world.leads else None
    take_step = build_step(recipe, batching, model, world, steps_per_epoch, trace)
    meter = take_step.meter
    record(
        "run", 0, recipe=job.name, sync=recipe.sync.kind, world_size=world.size, global_batch=batching.global_batch,
        layout=recipe.parallel.layout(world.size), epochs=recipe.epochs, steps_per_epoch=steps_per_epoch,
        steps=recipe.epochs * steps_per_epoch, target_top1=recipe.target_top1,
        train_images=dataset.train_order.images, val_images=dataset.val_order.images, note=job.note,
    )  # fmt: skip

    exempt_what_lives()
    clock.begin_training()
    meter.restart()
    step = 0
    for epoch in range(1, recipe.epochs + 1):
        record("epoch", step, epoch=epoch)
        for _ in range(steps_per_epoch):
            lr = learning_rate(recipe.schedule, recipe.optim.lr, step, steps_per_epoch, recipe.epochs)
            seed_step(recipe.seed, step, world)
            take_step(dataset.train, lr)
            step += 1
            if step % recipe.log_every == 0:
                meter.report(record, step, epoch, lr)
            outcome.advance(epoch, step, clock.train_s(), meter.sent_bytes)

        if recipe.evaluates_after(epoch):
            meter.report(record, step, epoch, lr)
            outcome.advance(epoch, step, clock.train_s(), meter.sent_bytes)
            take_step.settle()
            with clock.pause() as evaluation:
                exempt_what_lives()
                judged = take_step.judged()
                average_batch_norms(judged)
                accuracy = evaluate(judged, dataset, take_step.cast, world)
            meter.restart()
            outcome.judge(accuracy.top1, accuracy.top5, clock.run_s())
            record(
                "eval", step, epoch=epoch, top1=accuracy.top1, top5=accuracy.top5, images=accuracy.images,
                eval_s=evaluation.seconds, train_s=clock.train_s(),
            )  # fmt: skip
            if outcome.status == "reached":
                break
    else:
        outcome.status = "finished"
    if world.leads:
        about = describe(job.name, recipe, dataset.class_names)
        write_weights(judged.state_dict(), job.folder / FINAL_WEIGHTS, about)


def initial_model(recipe: Recipe, classes: int, world: World, weights: Weights | None = None) -> nn.Module:
    """The recipe's model on this rank's device, with the same weights everywhere: rank 0's ``weights`` (of
    :func:`starting_weights`), or fresh ones."""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, classes)
    if weights is not None:
        fill(model, weights)
    model = model.to(world.device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    same_everywhere(model)
    return model
