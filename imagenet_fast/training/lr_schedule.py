"""Compute the learning rate as a pure function of the step, and set it."""

from __future__ import annotations

import math
from typing import assert_never

import torch

from imagenet_fast.recipe import optim_config


def learning_rate(schedule: optim_config.Schedule, peak: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    It rises from ``start_lr`` during warm-up, whose last step runs at ``peak``. Then it decays over the remaining
    steps. The first of them also runs at ``peak``, unless the decay is counted from the start of training. Steps after
    the last epoch run at the rate at which the decay ends.

    Args:
        schedule: The recipe's schedule.
        peak: Highest learning rate.
        step: Optimizer step, from 0.
        steps_per_epoch: Optimizer steps in one epoch.
        epochs: Epochs of the whole run.
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        power = schedule.warmup_power
        return float(schedule.start_lr + (peak - schedule.start_lr) * (step + 1) ** power / warmup**power)
    done = min(1.0, (step - warmup) / max(1, epochs * steps_per_epoch - warmup))
    match schedule:
        case optim_config.Polynomial():
            if schedule.decay_from == "start":
                done = min(1.0, step / (epochs * steps_per_epoch))
            return float(schedule.end_lr + (peak - schedule.end_lr) * (1 - done) ** schedule.power)
        case optim_config.Cosine():
            return schedule.end_lr + (peak - schedule.end_lr) * (1 + math.cos(math.pi * done)) / 2
        case optim_config.StepDecay():
            passed = sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
            return float(peak * schedule.gamma**passed)
        case _:
            assert_never(schedule)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group of parameters, times the group's own ``lr_factor`` if it has one.

    A rate that is a tensor is written to, as a CUDA graph reads it there.
    """
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def keep_rates_on(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep the learning rate of every group of parameters in a tensor on ``device``, for ``set_rate`` to write to."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)
