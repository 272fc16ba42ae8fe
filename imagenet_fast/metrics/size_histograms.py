"""How large the pictures of a data set are, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.metrics.pictures import new_figure

_SHOWN = 0.99  # share of the pictures; a few are enormous


def draw_sizes(sizes: NDArray[np.int32], png: Path) -> None:
    """Histograms of the short and of the long side of pictures, whose width and height are ``sizes`` [pictures, 2]."""
    figure = new_figure(png, 9, 4)
    for axes, side, pixels in zip(figure.subplots(1, 2), ("short", "long"), np.sort(sizes, axis=1).T, strict=True):
        end = float(np.quantile(pixels, _SHOWN)) if len(pixels) else 1.0
        axes.hist(pixels, bins=60, range=(0, end * 1.05))
        axes.set(xlabel=f"{side} side, pixels", ylabel="pictures")
        axes.set_title(f"{np.sum(pixels > end * 1.05)} beyond", loc="right", fontsize="small")
    figure.savefig(png)
