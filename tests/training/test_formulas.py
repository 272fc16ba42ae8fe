"""Learning rates and losses against the formulas that they are defined by."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from imagenet_fast.recipe.optim_config import Cosine, Polynomial, StepDecay
from imagenet_fast.training.loss import build_loss
from imagenet_fast.training.lr_schedule import learning_rate

STEPS, EPOCHS = 10, 20


def rates(schedule: Polynomial | StepDecay | Cosine, peak: float = 2.0) -> list[float]:
    return [learning_rate(schedule, peak, step, STEPS, EPOCHS) for step in range(STEPS * EPOCHS)]


def test_the_warm_up_is_linear_from_its_start_to_the_peak():
    lr = rates(Cosine(kind="cosine", warmup_epochs=2, start_lr=0.5))
    assert lr[:20] == pytest.approx([0.5 + 1.5 * (step + 1) / 20 for step in range(20)])
    assert lr[20] == 2.0


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_after_the_last_epoch_it_stays(power: float):
    """A loop of one's own may take more steps than the recipe has."""
    falling = {"warmup_epochs": 2, "end_lr": 0.25}
    for schedule in (
        Polynomial(kind="polynomial", power=power, **falling), Cosine(kind="cosine", **falling),
        Polynomial(kind="polynomial", power=power, decay_from="start", **falling),
    ):  # fmt: skip
        for step in (STEPS * EPOCHS, STEPS * EPOCHS + 1, 3 * STEPS * EPOCHS):
            assert learning_rate(schedule, 2.0, step, STEPS, EPOCHS) == pytest.approx(0.25)


@pytest.mark.parametrize("power", [1, 2])
def test_polynomial_decay_is_counted_after_a_warm_up_that_may_end_amid_an_epoch(power: float):
    """With a power of 2 MLPerf's; with 1 airbench's triangle, from a share of the peak up and down in a line."""
    lr = rates(Polynomial(kind="polynomial", warmup_epochs=4.6, start_lr=0.4, power=power, end_lr=0.14))
    taken = np.arange(STEPS * EPOCHS)
    rising, left = 0.4 + 1.6 * (taken + 1) / 46, 1 - (taken - 46) / (STEPS * EPOCHS - 46)
    assert lr == pytest.approx(np.where(taken < 46, rising, 0.14 + 1.86 * left**power).tolist())


def test_steps_divide_at_their_milestones():
    lr = rates(StepDecay(kind="step", milestones=(5, 15), gamma=0.1))
    assert lr[:50] == [2.0] * 50
    assert lr[50:150] == pytest.approx([0.2] * 100)
    assert lr[150:] == pytest.approx([0.02] * 50)


def test_cosine_ends_beside_its_end():
    lr = rates(Cosine(kind="cosine", end_lr=0.1))
    assert lr[100] == pytest.approx(1.05)
    assert lr[-1] == pytest.approx(0.1 + 1.9 * (1 + math.cos(math.pi * 199 / 200)) / 2)
    assert lr == sorted(lr, reverse=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.08])
def test_binary_cross_entropy_is_the_formula_summed_over_classes(smoothing: float):
    """As Composer's binary_cross_entropy_with_logits, which divides the sum by the number of images."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9), torch.randint(9, (6,))
    shares = torch.full((6, 9), smoothing / 9, dtype=torch.float64)
    shares[range(6), labels] += 1 - smoothing
    p = logits.double().sigmoid()
    expected = -(shares * p.log() + (1 - shares) * (1 - p).log()).sum() / 6
    loss = build_loss("bce", smoothing)
    torch.testing.assert_close(loss(logits, labels).double(), expected)
    whole = torch.nn.functional.one_hot(labels, 9).float()
    torch.testing.assert_close(loss(logits, whole), loss(logits, labels), msg="labels may be shares, as of mixup")


def test_low_precision_logits_are_summed_in_fp32():
    logits, labels = torch.randn(4, 1000, dtype=torch.bfloat16), torch.randint(1000, (4,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = build_loss("bce", 0.1)(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, build_loss("bce", 0.1)(logits.float(), labels))
