"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.errors import UserError


def in_a_directory(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is measured for it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"{parameter.opts[0]} {file}: there is no directory {file.parent}; make it, or choose another")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=in_a_directory, help="Write the rows there too."),
]
PngOption = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", callback=in_a_directory, help="Draw them there.")
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", metavar="NAME|PATH", help="A shipped recipe's name, or a TOML file.")
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. optim.lr=0.5; repeatable."),
]
