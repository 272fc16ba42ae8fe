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
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from imagenet_fast.bench.collectives import AllReduceTime
from imagenet_fast.bench.comm_volume import Count
from imagenet_fast.bench.dataloaders import LoadingRate
from imagenet_fast.bench.engines import EngineTime
from imagenet_fast.bench.pipeline import PipelineTime
from imagenet_fast.bench.train_step import StepTime
from imagenet_fast.cli.main import app
from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.rows import Row
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
    "step": StepTime,
    "sync": EngineTime,
    "sync --count": Count,
    "collectives": AllReduceTime,
    "pipeline": PipelineTime,
    "data": LoadingRate,
}
"""The rows that each benchmark writes."""
PLAN_ROWS: dict[str, type] = {"plan": Planned, "plan --rows": Row}
"""The rows that predictions write."""


def recipe_page() -> str:
    """Return the page of all recipe keys, a table of them for each table of a recipe."""
    lines = [
        "# Recipe keys", "", GENERATED, "",
        "Every key that a recipe may have. `--set KEY=VALUE` changes one for a run, and",
        "`imagenet-fast recipes keys [PREFIX]` prints this list. Kinds in brackets: only these have the key.", "",
    ]  # fmt: skip
    for table, keys in groupby(recipe_keys(), lambda key: key.name.partition(".")[0] if "." in key.name else ""):
        lines += [f"## `[{table}]`: {SECTIONS[table]}" if table else "## The run itself", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *map(_key_row, keys), ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Return the page of all commands, with the flags of each."""
    lines = [
        "# Commands", "", GENERATED, "",
        "Every command with its arguments and flags, as `--help` has them. [Exit codes](exit-codes.md).", "",
    ]  # fmt: skip
    for name, command in _commands(typer.main.get_command(app), "imagenet-fast"):
        lines += [f"## `{name}`", "", _text(command.help), ""]
        shown = [param for param in command.params if not getattr(param, "hidden", False) and param.name != "help"]
        if shown:
            lines += ["| flag | value | default | meaning |", "|---|---|---|---|", *map(_flag_row, shown), ""]
    return "\n".join(lines)


def rows_page() -> str:
    """Return the page of the rows that ``bench --json`` writes."""
    lines = [
        "# Rows of bench and plan", "", GENERATED, "",
        "`--json FILE` writes a list of rows, one object each. Names end in their unit: `_s` is seconds, `_bytes` is",
        "bytes. Times are medians over interleaved rounds, unless their text says otherwise.", "",
    ]  # fmt: skip
    named = {f"bench {command}": row for command, row in ROWS.items()} | PLAN_ROWS
    for command, row in named.items():
        lines += [f"## `imagenet-fast {command}`", "", _prose(inspect.getdoc(row) or ""), ""]
        lines += ["| field | type | meaning |", "|---|---|---|"]
        meanings = _attribute_docstrings(row)
        lines += [
            f"| `{field.name}` | {_cell(str(field.type))} | {_cell(_prose(meanings.get(field.name, '')))} |"
            for field in dataclasses.fields(row)
        ]
        lines.append("")
    return "\n".join(lines)


def _attribute_docstrings(row: type) -> dict[str, str]:
    """Return the strings that stand below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(row))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


def _prose(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the command, if it does something by itself, and all below it."""
    below = getattr(command, "commands", {})
    if not below or command.params or getattr(command, "invoke_without_command", False):
        yield name, command
    for word, inner in below.items():
        if not inner.hidden:
            yield from _commands(inner, f"{name} {word}")


def _key_row(key: Key) -> str:
    kinds = f" ({', '.join(key.kinds)})" if key.kinds else ""
    return f"| `{key.name}`{kinds} | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.meaning)} |"


def _flag_row(param: Any) -> str:
    if param.opts[0].startswith("-"):
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    else:
        names = f"`{param.metavar or _type(param)}`"
    value = "" if getattr(param, "is_flag", True) else f"`{param.metavar or _type(param)}`"
    default = param.default
    empty = default in (None, (), [], False, "") or callable(default)
    shown = "required" if param.required else "" if empty else f"`{default}`"
    return f"| {_cell(names)} | {_cell(value)} | {_cell(shown)} | {_cell(_text(getattr(param, 'help', '')))} |"


def _type(param: Any) -> str:
    """Name the type of a flag's value; choices are listed."""
    annotation = param.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "TEXT")


def _text(text: str | None) -> str:
    """Return a help text as Markdown: without Rich's markup, flags as code."""
    plain = re.sub(r"\[/?(?:bold|dim|italic)\]", "", text or "").replace("\b", "")
    return re.sub(r"(`[^`]*`)|(?<![\w-])(--[a-z][a-z-]*)", lambda found: found[1] or f"`{found[2]}`", plain)


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
