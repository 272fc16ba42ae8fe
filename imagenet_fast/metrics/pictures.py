"""Pictures in files, by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError


def new_figure(png: Path, width: float, height: float) -> Any:
    """An empty matplotlib figure (inches) to be saved as ``png``. Raises UserError where that cannot be."""
    if png.suffix != ".png":
        raise UserError(f"--png {png} does not end in .png; it is the one kind of picture drawn")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib, which is not installed; `pip install matplotlib`") from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")
