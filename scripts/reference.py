"""Write the reference pages of the documentation: every flag, every key of a recipe, every row of bench.

A page begins with text of its own; what follows after a comment is written.

python scripts/reference.py            write docs/reference/{commands,recipe,bench-rows}.md
python scripts/reference.py --check    exit with 1 if they are not up to date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import typer.cli

from imagenet_fast.bench.collectives import AllReduceTime
from imagenet_fast.bench.comm_volume import Count
from imagenet_fast.bench.dataloaders import LoadingRate
from imagenet_fast.bench.engines import EngineTime
from imagenet_fast.bench.pipeline import PipelineTime
from imagenet_fast.bench.plan_validation import Validated
from imagenet_fast.bench.train_step import StepTime
from imagenet_fast.cli.main import app
from imagenet_fast.compare.report import RunSummary
from imagenet_fast.plan.fastest import Way
from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.rows import Compared
from imagenet_fast.recipe.key_reference import Key, recipe_keys

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GENERATED = "<!-- What follows is written by scripts/reference.py: change the texts in the code. -->"
ROWS: dict[str, type] = {
    "bench step": StepTime,
    "bench sync": EngineTime,
    "bench count": Count,
    "bench collectives": AllReduceTime,
    "bench pipeline": PipelineTime,
    "bench data": LoadingRate,
    "report": RunSummary,
    "plan": Planned,
    "plan fastest": Way,
    "plan rows": Compared,
    "plan validate": Validated,
}
"""The rows that benchmarks, reports and predictions write."""


def recipe_page() -> Iterator[str]:
    """Yield the lines of all recipe keys, a table of them for each table of a recipe."""
    for name, keys in groupby(recipe_keys(), lambda key: key.name.partition(".")[0] if "." in key.name else ""):
        yield from (f"## `[{name}]`" if name else "## The run itself", "")
        yield from _table("key | type | default | meaning", map(_key_cells, keys))


def commands_page() -> Iterator[str]:
    """Yield the text of all commands, as typer describes them."""
    program: Any = inspect.unwrap(typer.main.get_command)(app)  # a tree of its own: tests share one, which remembers
    _drop_hidden(program)
    name = "imagenet-fast"
    text = typer.cli.get_docs_for_click(
        obj=program, ctx=typer.Context(program, info_name=name, **program.context_settings), name=name, title="Commands"
    )
    yield re.sub(r"(`[^`\n]+`)|<", lambda found: found[1] or "&lt;", text.partition("\n")[2].strip())
    yield ""


def _drop_hidden(command: Any) -> None:
    """Leave out hidden commands below ``command``."""
    below = getattr(command, "commands", {})
    for name, inner in list(below.items()):
        if inner.hidden:
            del below[name]
        _drop_hidden(inner)


def rows_page() -> Iterator[str]:
    """Yield the lines of the rows that ``--json`` writes."""
    for command, row in ROWS.items():
        yield from (f"## `imagenet-fast {command}`", "", _prose(inspect.getdoc(row) or ""), "")
        meanings = _attribute_docstrings(row)
        cells = ((f"`{f.name}`", str(f.type), _prose(meanings.get(f.name, ""))) for f in dataclasses.fields(row))
        yield from _table("field | type | meaning", cells)


def _table(headings: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table and an empty line."""
    rule = "---".join("|" * (headings.count("|") + 2))
    return [f"| {headings} |", rule, *(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]


def _attribute_docstrings(row: type) -> dict[str, str]:
    """Return the strings that stand below the fields of a dataclass and of those that it extends."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(row))).body
    assert isinstance(tree, ast.ClassDef)
    extended = _attribute_docstrings(row.__base__) if dataclasses.is_dataclass(row.__base__) else {}
    return extended | {
        field.target.id: text.value.value
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


def _prose(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _key_cells(key: Key) -> tuple[str, ...]:
    kinds = f" ({', '.join(key.kinds)})" if key.kinds else ""
    return f"`{key.name}`{kinds}", key.type, key.default, key.meaning


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


PAGES = {"recipe.md": recipe_page, "commands.md": commands_page, "bench-rows.md": rows_page}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them; return the exit code."""
    stale = []
    for name, lines in PAGES.items():
        file = FOLDER / name
        old = file.read_text(encoding="utf-8")
        new = "\n".join([old[: old.index(GENERATED)] + GENERATED, "", *lines()])
        if "--check" not in arguments:
            file.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(name)
    if stale:
        print(f"docs/reference: {', '.join(stale)} not up to date; run `python scripts/reference.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
