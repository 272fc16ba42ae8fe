"""Tables without frames for a terminal of any width, in which nothing is cut off; and number formatting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from imagenet_fast.recipe.key_reference import Key
from imagenet_fast.recipe.load import load_recipe, recipe_folder, recipe_names
from imagenet_fast.recipe.schema import Recipe

NOTHING = "–"
"""The cell for a missing value."""

_GAP = 2  # characters between columns
_NAME = 10  # least characters for the first column before other columns are moved below


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return ``value`` in the format ``form``, with its unit, or a dash for None."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def compact_table(text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of left-aligned columns ``text``, then right-aligned columns ``numbers``.

    If they do not fit side by side, the first column is folded. If that is not enough, the other columns are shown in
    several pieces, one below the other, each with the first column. So no number is ever cut. Cells are no markup.
    """
    columns = [Column(name, no_wrap=True) for name in text]
    columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
    table = _WrappedTable(*columns, box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class _WrappedTable(Table):
    """A table that is split into pieces if it is too wide for the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:  # in the width of the terminal, not of the table
            yield Text(str(self.title), style="italic")
        yield from self._pieces(console, options)
        if self.caption:
            yield Text(str(self.caption), style="dim")

    def _pieces(self, console: Console, options: ConsoleOptions) -> Iterator[str | Table]:
        """Yield the whole table if it is narrow enough, else its pieces with an empty line between them."""
        name, *others = (self._width(console, options, column) for column in self.columns)
        room = options.max_width
        if name + sum(_GAP + width for width in others) <= room:
            yield self._piece(range(len(self.columns)), [name, *others])
            return
        pieces = list(_packed(others, room - min(name, _NAME)))
        widest = max((sum(_GAP + others[place] for place in piece) for piece in pieces), default=0)
        name = min(name, max(1, room - widest))
        for number, piece in enumerate(pieces or [[]]):
            if number:
                yield ""
            yield self._piece([0, *(1 + place for place in piece)], [name, *(others[place] for place in piece)])

    def _width(self, console: Console, options: ConsoleOptions, column: Column) -> int:
        """Return the width of the column's widest cell, at most the terminal's."""
        return max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))

    def _piece(self, places: Sequence[int], widths: Sequence[int]) -> Table:
        """Return a table of the columns at ``places`` alone."""
        chosen = [self.columns[place] for place in places]
        columns = [
            Column(column.header, justify=column.justify, width=width, overflow="fold")
            for column, width in zip(chosen, widths, strict=True)
        ]
        piece = Table(*columns, box=None, padding=self.padding, pad_edge=False)
        for row in zip(*(column.cells for column in chosen), strict=True):
            piece.add_row(*row)
        return piece


def _packed(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield groups of columns that fit into ``room`` beside the first column; at least one column each."""
    piece: list[int] = []
    taken = 0
    for place, width in enumerate(widths):
        if piece and taken + _GAP + width > room:
            yield piece
            piece, taken = [], 0
        piece.append(place)
        taken += _GAP + width
    if piece:
        yield piece


def recipe_table() -> Table:
    """Return a table of the recipes: model, optimizer, engine, ranks, batch, epochs and target accuracy.

    Before the ranks stands their layout: ``tp4`` is four shards, ``pp4`` four stages, ``dp`` data parallelism alone.
    """
    recipes = {name: load_recipe(recipe_folder() / f"{name}.toml") for name in recipe_names()}
    return compact_table(
        ("recipe", "model", "optim", "engine"),
        ("ranks", "batch", "epochs", "target"),
        (_row(name, recipe) for name, recipe in recipes.items()),
    )


def key_list(keys: Iterable[Key]) -> Group:
    """Return the keys one below the other: name, type and default in a line, and what it means below it."""
    pieces: list[Text | Padding] = []
    for key in keys:
        kinds = f"  ({', '.join(key.kinds)})" if key.kinds else ""
        default = key.default if key.default in ("required", "absent", "derived") else f"default {key.default}"
        pieces.append(Text.assemble((key.name, "bold"), f"  {key.type}; {default}", (kinds, "dim")))
        pieces.append(Padding(Text(key.meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
    return Group(*pieces)


def _row(name: str, recipe: Recipe) -> tuple[str, ...]:
    target = f"{recipe.target_top1:g} %" if recipe.target_top1 is not None else "–"
    layout = recipe.parallel.layout(recipe.parallel.ranks) if recipe.parallel.ranks > 1 else "dp"
    numbers = (f"{layout} {recipe.ranks}", str(recipe.global_batch), str(recipe.epochs))
    return name, recipe.model.label, recipe.optim.kind, recipe.sync.kind, *numbers, target
