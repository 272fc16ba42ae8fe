"""Write the reference pages of the documentation: every flag, every key of a recipe, every row of bench.

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
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from imagenet_fast.bench.collectives import AllReduceTime
from imagenet_fast.bench.comm_volume import Count
from imagenet_fast.bench.dataloaders import LoadingRate
from imagenet_fast.bench.engines import EngineTime
from imagenet_fast.bench.pipeline import PipelineTime
from imagenet_fast.bench.published import BatchRow, Rung
from imagenet_fast.bench.train_step import StepTime
from imagenet_fast.cli.main import app
from imagenet_fast.compare.report import RunSummary
from imagenet_fast.plan.fastest import Way
from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.rows import Compared
from imagenet_fast.recipe.key_reference import Key, recipe_keys

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GENERATED = "<!-- Written by scripts/reference.py: change the texts in the code. -->"
SECTIONS = {
    "model": "the network",
    "data": "images, loader, augmentation",
    "precision": "the dtype of the computation",
    "optim": "the optimizer",
    "schedule": "the learning rate over the epochs",
    "sync": "the engine that averages gradients",
    "parallel": "how a model is divided over ranks",
    "checkpoint": "when the state is saved",
    "timeout": "how long a rank may stand still",
}
"""What each table of a recipe sets."""


ROWS: dict[str, type] = {
    "bench step": StepTime,
    "bench sync": EngineTime,
    "bench count": Count,
    "bench collectives": AllReduceTime,
    "bench published ladder": Rung,
    "bench published batches": BatchRow,
    "bench pipeline": PipelineTime,
    "bench data": LoadingRate,
    "report": RunSummary,
    "plan": Planned,
    "plan --fastest": Way,
    "plan rows": Compared,
}
"""The rows that benchmarks, reports and predictions write."""


def recipe_page() -> str:
    """Return the page of all recipe keys, a table of them for each table of a recipe."""
    lines = [
        "Every key that a recipe may have. `--set KEY=VALUE` changes one for a run, and",
        "`imagenet-fast recipes keys [PREFIX]` prints this list. Kinds in brackets: only these have the key.", "",
    ]  # fmt: skip
    for name, keys in groupby(recipe_keys(), lambda key: key.name.partition(".")[0] if "." in key.name else ""):
        lines += [f"## `[{name}]`: {SECTIONS[name]}" if name else "## The run itself", ""]
        lines += _table("key | type | default | meaning", map(_key_cells, keys))
    return _page("Recipe keys", lines)


def commands_page() -> str:
    """Return the page of all commands, as typer describes them."""
    program: Any = inspect.unwrap(typer.main.get_command)(app)  # a tree of its own: tests share one, which remembers
    _drop_hidden(program)
    name = "imagenet-fast"
    text = get_docs_for_click(
        obj=program, ctx=typer.Context(program, info_name=name, **program.context_settings), name=name, title="Commands"
    )
    about = "Every command with its arguments and options, as `--help` has them. [Exit codes](exit-codes.md)."
    escaped = re.sub(r"(`[^`\n]+`)|<", lambda found: found[1] or "&lt;", text.partition("\n")[2].rstrip())
    return _page("Commands", [about, escaped, ""])


def _drop_hidden(command: Any) -> None:
    """Leave out hidden commands below ``command``."""
    below = getattr(command, "commands", {})
    for name, inner in list(below.items()):
        if inner.hidden:
            del below[name]
        _drop_hidden(inner)


def rows_page() -> str:
    """Return the page of the rows that ``bench --json`` writes."""
    lines = [
        "`--json FILE` writes a list of rows, one object each. Names end in their unit: `_s` is seconds, `_bytes` is",
        "bytes. Times are medians over interleaved rounds, unless their text says otherwise.", "",
    ]  # fmt: skip
    for command, row in ROWS.items():
        lines += [f"## `imagenet-fast {command}`", "", _prose(inspect.getdoc(row) or ""), ""]
        meanings = _attribute_docstrings(row)
        cells = ((f"`{f.name}`", str(f.type), _prose(meanings.get(f.name, ""))) for f in dataclasses.fields(row))
        lines += _table("field | type | meaning", cells)
    return _page("Rows of bench, report and plan", lines)


def _page(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"# {title}", "", GENERATED, "", *lines])


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


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them; return the exit code."""
    pages = (("recipe.md", recipe_page()), ("commands.md", commands_page()), ("bench-rows.md", rows_page()))
    stale = []
    for name, page in pages:
        file = FOLDER / name
        if "--check" not in arguments:
            file.write_text(page, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != page:
            stale.append(name)
    if stale:
        print(f"docs/reference: {', '.join(stale)} not up to date; run `python scripts/reference.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
