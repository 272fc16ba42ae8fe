"""Tables for a terminal of 80 columns: no frame, nothing cut off; and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Column, Table

NOTHING = "–"


def number(value: float | None, form: str, unit: str = "") -> str:
    """``value`` in the format ``form``, or a dash where there is none."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def compact_table(text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns headed ``text``, left-aligned, then ``numbers``, right-aligned."""
    columns = [Column(name, no_wrap=True) for name in text]
    columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
