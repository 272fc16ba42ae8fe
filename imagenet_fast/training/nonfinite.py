"""Count steps whose loss is not finite, and say why a run has to end for it."""

from __future__ import annotations

from torch import Tensor, nn

from imagenet_fast.distributed.reductions import gather_rows


def must_be_finite(model: nn.Module) -> list[Tensor]:
    """Return parameters and running statistics; other buffers, such as masks, may hold infinities."""
    statistics = [value for name, value in model.named_buffers() if "running_" in name]
    values = [value.detach() for value in (*model.parameters(), *statistics)]
    return [value for value in values if value.numel() and value.is_floating_point()]


class NonFiniteLoss(Exception):
    """Losses or weights are not finite, so continuing is useless; raised on all ranks alike."""


def describe_nonfinite(streak: Tensor, step: int) -> tuple[int, str]:
    """Return the first wrong step and a sentence on why the run ends after ``step``; every rank must call it.

    The ``streak`` is that of ``TrainState``.
    """
    streaks = gather_rows([int(streak)])[:, 0]
    longest = int(streaks.max())
    wrong_from = step - longest + 1
    if not longest:
        sentence = f"step {step} has left weights or statistics that are not finite"
    else:
        ranks = (streaks == longest).nonzero()[:, 0].tolist()
        first = f", at first on rank {ranks[0]} alone" if len(ranks) == 1 < len(streaks) else ""
        steps = "1 step" if longest == 1 else f"{longest} steps"
        sentence = f"the loss has not been finite for {steps}, from step {wrong_from} on{first}"
    remedy = (
        "lower optim.lr or lengthen schedule.warmup_epochs" if wrong_from > 1 else
        "see to data.mean, data.std, the images and the first weights"
    )  # fmt: skip
    return wrong_from, f"{sentence}; {remedy}, and begin another run"
