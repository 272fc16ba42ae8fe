"""Figures in one style; matplotlib is imported by those who draw."""

from __future__ import annotations

from typing import Any


def new_figure(width: float = 9, height: float = 5) -> Any:
    """Create an empty matplotlib figure of ``width`` x ``height`` inches, whose axes have no spines above and right."""
    from matplotlib import rcParams  # half a second, for those who draw
    from matplotlib.figure import Figure

    rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "legend.fontsize": 8})
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def plot_label(text: str) -> str:
    """Return ``text`` for a title or a legend: no ``$`` begins a formula, no underscore keeps it out of the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def legend_below(figure: Any, columns: int = 3) -> None:
    """Put the legend of the first axes below all axes, in ``columns``."""
    shown = figure.axes[0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=columns, frameon=False)
