"""Losses of a classifier, as means over images."""

from __future__ import annotations

from collections.abc import Callable
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
            return BinaryCrossEntropy(label_smoothing)
        case _:
            assert_never(kind)


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy with logits, summed over classes, in fp32 (Wightman et al., arXiv 2110.00476).

    A mean over classes, as torch takes it, would need a rate that grows with their number.
    """

    def __init__(self, label_smoothing: float) -> None:
        """Keep the share of a label that is spread evenly over all classes."""
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over images; see ``Loss``."""
        classes = logits.size(1)
        shares = one_hot(labels, classes) if labels.dtype == torch.int64 else labels
        shares = shares.float().mul(1 - self.label_smoothing).add(self.label_smoothing / classes)
        return binary_cross_entropy_with_logits(logits.float(), shares, reduction="sum") / len(logits)
