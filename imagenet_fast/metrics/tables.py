"""Show results: rows whose fields say how they are shown, tables that fit any terminal, JSON files, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from imagenet_fast.atomic_io import to_json
from imagenet_fast.errors import UserError
from imagenet_fast.units import NOTHING

Form = str | Callable[[Any], str]
"""Show a value by this: a format string as of ``format``, or a function that returns the text."""

_GAP = 2  # characters between columns
_FACTORS = {"ms": 1e3, "ms/step": 1e3, "us": 1e6, "MB": 1e-6, "MB/s": 1e-6, "min": 1 / 60}
_NAME = 20  # up to this length, words of the first column stay whole, and rather other columns are moved below


def write_json(value: Any, path: Path | None) -> None:
    """Write the result of a command to ``path``, if there is one. Raises UserError if it cannot be written."""
    try:
        if path is not None:
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

        def width(column: Column, end: int = 1) -> int:
            return max(console.measure(cell, options=options)[end] for cell in (column.header, *column.cells))

        first, *others = self.columns
        pieces, room = [[first]], options.max_width - min(_NAME, width(first, end=0))
        left = room
        for column in others:
            needed = _GAP + width(column)
            if needed > left and len(pieces[-1]) > 1:
                pieces.append([first])
                left = room
            pieces[-1].append(column)
            left -= needed
        return pieces


@dataclass(frozen=True)
class Row:
    """One row of a result.

    A field with the metadata of ``column`` or ``columns_of`` is a column of the table; JSON has all fields.
    """

    note: ClassVar[str] = ""
    """Text below the table, for its reader."""

    @property
    def title(self) -> str:
        """Text above the table: what its rows have in common."""
        return ""


@dataclass(frozen=True)
class _Column:
    """A column: the path of the field, the heading, the unit in which it is shown, and the format."""

    path: str
    heading: str
    unit: str
    form: Form

    def value(self, row: Row) -> Any:
        """Return the field's value in ``row``."""
        return attrgetter(self.path)(row)

    def cell(self, row: Row) -> str:
        """Return the text of the field in ``row``; a dash for None, and of a tuple the items with spaces between."""
        value = self.value(row)
        return " ".join(map(self._text, value)) if isinstance(value, tuple) else self._text(value)

    def _text(self, value: Any) -> str:
        if value is None:
            return NOTHING
        converted = value * _FACTORS[self.unit] if self.unit in _FACTORS else value
        return format(converted, self.form) if isinstance(self.form, str) else self.form(converted)


def column(heading: str, unit: str = "", form: Form = "") -> dict[str, Any]:
    """Return the metadata of a field that is a column.

    Args:
        heading: What the column is called.
        unit: The unit in which it is shown, which follows the heading. Fields are in seconds and bytes; ``ms``, ``us``,
            ``MB``, ``MB/s`` and ``min`` are converted to.
        form: Format of the cells, or a function of the converted value that returns a cell's text.
    """
    return {"heading": heading, "unit": unit, "form": form}


def columns_of(*names: str, heading: str = "") -> dict[str, Any]:
    """Return the metadata of a field that holds a row, of which these fields are columns, with ``heading`` before."""
    return {"names": names, "of": heading}


def table(rows: Sequence[Row]) -> Table:
    """Return the table of ``rows``; a column that has None in every row is left out."""
    shown = [c for c in _columns(rows[0]) if any(c.value(row) is not None for row in rows)]
    text = [c for c in shown if all(isinstance(c.value(row), str | bool | None) for row in rows)]
    numbers = [c for c in shown if c not in text]
    built = compact_table(
        [c.heading for c in text],
        [f"{c.heading} {c.unit}".strip() for c in numbers],
        ([c.cell(row) for c in [*text, *numbers]] for row in rows),
    )
    built.title, built.caption = rows[0].title or None, rows[0].note or None
    return built


def _columns(row: Row, path: str = "", heading: str = "", names: Sequence[str] = ()) -> Iterator[_Column]:
    """Yield the columns of a row, or of a row inside one, in the order of its fields; ``names``: only of these."""
    for field in fields(row):
        match dict(field.metadata):
            case {"heading": own, "unit": unit, "form": form} if not names or field.name in names:
                yield _Column(path + field.name, f"{heading} {own}".strip(), unit, form)
            case {"names": inner, "of": of}:
                yield from _columns(getattr(row, field.name), f"{field.name}.", of, inner)


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
