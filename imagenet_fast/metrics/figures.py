"""Begin and finish figures, in one style; matplotlib is imported by those who draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError


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


def finish(figure: Any, columns: int = 3) -> None:
    """Hide the top and right spines, and put the first axes' legend below, in ``columns``; 0: no legend."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if columns:
        shown = figure.axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=columns, frameon=False)
