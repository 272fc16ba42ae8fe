"""The training loop and nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imagenet_fast.checkpoint import save_weights
from imagenet_fast.clock import Clock
from imagenet_fast.data import open_dataset
from imagenet_fast.evaluate import evaluate
from imagenet_fast.job import Job
from imagenet_fast.meter import Meter
from imagenet_fast.models import build_model, compile_blocks
from imagenet_fast.optim import build_optimizer
from imagenet_fast.precision import LossScale, autocast
from imagenet_fast.record import Outcome, Record
from imagenet_fast.schedule import learning_rate
from imagenet_fast.sync import attach
from imagenet_fast.world import World, average_batch_norms, same_everywhere


def train(job: Job, world: World, clock: Clock, record: Record, outcome: Outcome) -> None:
    """Train ``job`` until its target or its last epoch; ``outcome`` is kept up to date all the way."""
    recipe, batching, device = job.recipe, job.batching, world.device
    dataset = open_dataset(recipe.data, job.data, batching, world.rank, world.local_size, device, recipe.seed)
    steps_per_epoch = dataset.train_order.steps_per_epoch

    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, dataset.classes).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    same_everywhere(model)
    torch.manual_seed(recipe.seed + world.rank)  # so that dropout differs between ranks
    average = _moving_average(model, recipe.ema_decay) if recipe.ema_decay else None
    judged = average.module if average is not None else model  # what is evaluated and saved
    if recipe.compile:
        compile_blocks(model)
    forward, sync = attach(model, recipe.sync)
    optimizer = build_optimizer(recipe.optim, model)
    peak_lr = recipe.optim.lr * batching.lr_factor
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    cast, scale = autocast(recipe.precision, device), LossScale(recipe.precision, device)
    meter = Meter(world, batching.global_batch)

    record(
        "run", 0, recipe=job.name, sync=recipe.sync.kind, world_size=world.size, global_batch=batching.global_batch,
        epochs=recipe.epochs, steps_per_epoch=steps_per_epoch, steps=recipe.epochs * steps_per_epoch,
        target_top1=recipe.target_top1, train_images=dataset.train_order.images,
        val_images=dataset.val_order.images, lines=job.lines,
    )  # fmt: skip
    clock.begin_training()
    step = 0
    for epoch in range(1, recipe.epochs + 1):
        record("epoch", step, epoch=epoch)
        meter.restart()
        for _ in range(steps_per_epoch):
            lr = learning_rate(recipe.schedule, peak_lr, step, steps_per_epoch, recipe.epochs)
            sync.zero_grad()
            for micro_step in range(1, batching.accumulation + 1):
                images, labels = meter.fetch(dataset.train)
                with sync.no_sync() if micro_step < batching.accumulation else nullcontext():
                    with cast:
                        loss = criterion(forward(images), labels) / batching.accumulation
                    scale(loss).backward()
                meter.add_loss(loss)
            meter.add_step(sync.finish())
            optimizer.step(lr, found_inf=scale.unscale(optimizer.params))
            if average is not None:
                average.update_parameters(model)
            step += 1
            if step % recipe.log_every == 0:
                meter.report(record, step, epoch, lr)
            outcome.advance(epoch, step, clock.train_s(), meter.sent_bytes)

        if epoch % recipe.eval_every == 0 or epoch == recipe.epochs:
            meter.report(record, step, epoch, lr)
            with clock.pause() as evaluation:
                average_batch_norms(judged)
                accuracy = evaluate(judged, dataset, cast, world)
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
        save_weights(judged, job.folder / "checkpoints" / "final.safetensors")


def _moving_average(model: nn.Module, decay: float) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
