"""Losses against timm's and against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from imagenet_fast.training.loss import build_loss


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
