"""Format results: tables that fit any terminal, numbers as text, and JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from imagenet_fast.errors import UserError

NOTHING = "–"
"""The cell for a missing value."""

_GAP = 2  # characters between columns
_NAME = 10  # least characters for the first column before other columns are moved below


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return ``value`` in the format ``form``, with its unit, or a dash for None."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON with null for NaN and infinities, which RFC 8259 lacks; NumPy's numbers may be in it."""
    text = json.dumps(value, default=lambda number: number.item())
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent)


def write_json(value: Any, path: Path) -> None:
    """Write the result of a command to ``path``. Raises UserError if it cannot be written."""
    try:
        path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}); choose another place") from None


def compact_table(text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of left-aligned columns ``text``, then right-aligned columns ``numbers``.

    If they do not fit side by side, the first column is folded. If that is not enough, the other columns are shown in
    several pieces, one below the other, each with the first column. So no number is ever cut. Cells are no markup.
    """
    columns = [Column(name, overflow="fold", no_wrap=place > 0) for place, name in enumerate(text)]
    columns += [Column(name, overflow="fold", no_wrap=True, justify="right") for name in numbers]
    table = _PiecedTable(*columns, box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class _PiecedTable(Table):
    """A table that is split into pieces if it is too wide for the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:  # in the width of the terminal, not of the table
            yield Text(str(self.title), style="italic")
        for number, piece in enumerate(self._pieces(console, options)):
            if number:
                yield ""
            table = Table(*map(copy, piece), box=None, padding=self.padding, pad_edge=False)
            table.rows = self.rows
            yield table
        if self.caption:
            yield Text(str(self.caption), style="dim")

    def _pieces(self, console: Console, options: ConsoleOptions) -> list[list[Column]]:
        """Return groups of columns that fit side by side, each with the first column and at least another."""

        def width(column: Column) -> int:
            return max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))

        first, *others = self.columns
        pieces, room = [[first]], options.max_width - min(_NAME, width(first))
        left = room
        for column in others:
            needed = _GAP + width(column)
            if needed > left and len(pieces[-1]) > 1:
                pieces.append([first])
                left = room
            pieces[-1].append(column)
            left -= needed
        return pieces
