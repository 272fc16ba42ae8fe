"""Losses of a classifier, as means over images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function from logits [n, classes] and labels, int64 [n] or shares of classes [n, classes], to the mean loss."""


def build_loss(kind: Literal["cross_entropy", "bce"], label_smoothing: float) -> Loss:
    """Build the loss that a recipe names.

    Args:
        kind: "cross_entropy", or "bce", the sum of the classes' binary cross-entropies.
        label_smoothing: Share of a label that is spread evenly over all classes.
    """
    match kind:
        case "cross_entropy":
            return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        case "bce":
            return partial(_binary_cross_entropy, label_smoothing=label_smoothing)
        case _:
            assert_never(kind)


def _binary_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Return the binary cross-entropy, summed over classes, in fp32 (Wightman et al., arXiv 2110.00476).

    A mean over classes, as torch takes it, would need a rate that grows with their number.
    """
    classes = logits.size(1)
    shares = one_hot(labels, classes) if labels.dtype == torch.int64 else labels
    shares = shares.float().mul(1 - label_smoothing).add(label_smoothing / classes)
    return binary_cross_entropy_with_logits(logits.float(), shares, reduction="sum") / len(logits)
