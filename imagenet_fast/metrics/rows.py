"""Rows of results: dataclasses whose fields say how they are shown. One table, and JSON, is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from imagenet_fast.metrics.tables import NOTHING, compact_table, write_json

Form = str | Callable[[Any], str]
"""How a value is shown: a format as of ``format``, or a function that returns the text."""

_FACTORS = {"ms": 1e3, "ms/step": 1e3, "us": 1e6, "MB": 1e-6, "MB/s": 1e-6, "min": 1 / 60}


@dataclass(frozen=True)
class Row:
    """One row of a benchmark or a prediction.

    A field with the metadata of ``column`` or ``columns_of`` is a column of the table; JSON has all fields.
    """

    note: ClassVar[str] = ""
    """Text below the table, for its reader."""

    @property
    def title(self) -> str:
        """Text above the table: what its rows have in common."""
        return ""


@dataclass(frozen=True)
class NetworkRow(Row):
    """A row that was measured between ranks, with the place first."""

    hosts: int
    """Number of nodes."""
    ranks_per_host: int
    """Ranks on each node."""
    rate: str | None
    """Rate of each node's link, as given; None: the loopback interface."""

    @property
    def network(self) -> str:
        """The place in words, such as ``4 nodes of 2 ranks, 250mbit``."""
        hosts = f"{self.hosts} node{'s' if self.hosts > 1 else ''}"
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{hosts}{ranks}, {self.rate or 'loopback'}"


@dataclass(frozen=True)
class Column:
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
    """Build the table of rows; a column that has None in every row is left out."""
    shown = [c for c in _columns(rows[0]) if any(c.value(row) is not None for row in rows)]
    text = [c for c in shown if all(isinstance(c.value(row), str | None) for row in rows)]
    numbers = [c for c in shown if c not in text]
    built = compact_table(
        [c.heading for c in text],
        [f"{c.heading} {c.unit}".strip() for c in numbers],
        ([c.cell(row) for c in [*text, *numbers]] for row in rows),
    )
    built.title, built.caption = rows[0].title or None, rows[0].note or None
    return built


def show(rows: Sequence[Row], json_file: Path | None, most: int | None = None) -> None:
    """Print ``rows`` as a table, ``most`` of them at most, and write all as JSON if a file is given."""
    Console().print(table(rows[:most]))
    if json_file is not None:
        write_json([asdict(row) for row in rows], json_file)


def _columns(row: Row, path: str = "", heading: str = "", names: Sequence[str] = ()) -> Iterator[Column]:
    """Yield the columns of a row, or of a row inside one, in the order of its fields; ``names``: only of these."""
    for field in fields(row):
        match dict(field.metadata):
            case {"heading": own, "unit": unit, "form": form} if not names or field.name in names:
                yield Column(path + field.name, f"{heading} {own}".strip(), unit, form)
            case {"names": inner, "of": of}:
                yield from _columns(getattr(row, field.name), f"{field.name}.", of, inner)
