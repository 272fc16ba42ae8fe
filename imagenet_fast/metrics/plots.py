"""Draw plots as PNG files with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.errors import UserError

_SHOWN = 0.99  # share of the images within the axes; a few are enormous


def new_figure(png: Path, width: float, height: float) -> Any:
    """Create an empty matplotlib figure of ``width`` x ``height`` inches, to be saved as ``png``.

    Raises:
        UserError: The name does not end in .png.
    """
    if png.suffix != ".png":
        raise UserError(f"--png {png} does not end in .png; give a name that does")
    from matplotlib.figure import Figure  # half a second, for those who draw

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def plot_label(text: str) -> str:
    """Return ``text`` for a title or a legend: no ``$`` begins a formula, no underscore keeps it out of the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def draw_sizes(sizes: NDArray[np.int32], png: Path) -> None:
    """Draw histograms of the short and the long side of images of ``sizes`` [images, 2], width and height."""
    figure = new_figure(png, 9, 4)
    for axes, side, pixels in zip(figure.subplots(1, 2), ("short", "long"), np.sort(sizes, axis=1).T, strict=True):
        end = float(np.quantile(pixels, _SHOWN)) if len(pixels) else 1.0
        axes.hist(pixels, bins=60, range=(0, end * 1.05))
        axes.set(xlabel=f"{side} side, pixels", ylabel="images")
        axes.set_title(f"{np.sum(pixels > end * 1.05)} beyond", loc="right", fontsize="small")
    figure.savefig(png)
