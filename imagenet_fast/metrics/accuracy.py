"""The accuracies that an evaluation measures, and which of them a target is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(kw_only=True)
class Accuracy:
    """Top-1 and top-5 accuracy over ``images`` validation images, in percent; None: not measured.

    The label is the first, or among the first five, of the model's guesses.
    """

    top1: float | None = None
    top5: float | None = None
    top1_mirror: float | None = None
    """Top-1 by the mean logits of each image and its mirror image."""
    top5_mirror: float | None = None
    """Top-5 by the same."""
    top1_shift: float | None = None
    """Top-1 by the mean logits of shifted images, too."""
    top5_shift: float | None = None
    """Top-5 by the same."""
    images: int = 0
    bad_images: int | None = None
    """Images that could not be decoded, and were counted as wrong; None: no such image."""

    def measured(self) -> dict[str, Any]:
        """Return what was measured, by name."""
        return {field.name: value for field in fields(Accuracy) if (value := getattr(self, field.name)) is not None}


def target_metric(values: Mapping[str, Any], mirrored: bool) -> str:
    """Return the name of the accuracy that is compared with the target.

    Args:
        values: Accuracies of an evaluation, by name.
        mirrored: The recipe's ``target_mirrored``.
    """
    if not mirrored:
        return "top1"
    return "top1_mirror" if values.get("top1_shift") is None else "top1_shift"
