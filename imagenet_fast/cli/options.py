"""Types of options, and what those mean that commands of several modules have.

Options of several commands:
    recipe: Name of a shipped recipe, or a TOML file.
    data: Directory of the images: train/<class>/* and val/<class>/*, or shards.
    weights: A .safetensors or .pth file; a run directory, for its final weights; or one of its checkpoints, as
        RUN@best, RUN@newest or RUN@step-1200.
    keys: Keys of the recipe to change, such as optim.lr=0.5. KEY=none leaves out one that may be absent. --set
        KEY=VALUE is the same.
    sync: Gradient-sync engine to use instead of the recipe's. Of the recipe's sync keys only sync.wire is kept.
    nproc: Number of ranks on this node. Default: one per GPU, or 2 without GPUs.
    nodes: Number of nodes; run the same command on each. Default: 1, or all nodes of srun.
    rdzv_endpoint: Where several nodes meet: one of them, and a free port of it.
    join_timeout: How long nodes and ranks wait for each other at the start.
    on_bad_image: If an image cannot be decoded: end the run (fail, the default), or skip it: training takes another,
        and an evaluation counts it as wrong.
    json_file: Also write the result to this file, as JSON.
    png: Also draw the result to this image file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from imagenet_fast.errors import UserError


def in_a_directory(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    """Raise UserError for a file that cannot be written in its place, before anything is measured for it."""
    if file is not None and file.is_dir():
        raise UserError(f"{parameter.opts[0]} {file} is a directory; name a file")
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"{parameter.opts[0]} {file}: there is no directory {file.parent}; make it, or choose another")
    return file


def png_file(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    """Raise UserError for a picture that cannot be written in its place, or does not end in .png."""
    picture = in_a_directory(parameter, file)
    if picture is not None and picture.suffix != ".png":
        raise UserError(f"--png {picture} does not end in .png; give a name that does")
    return picture


def run_directory(text: str) -> Path:
    """Parse ``--out``; an empty one, as of a shell variable that is not set, is refused."""
    if not text:
        raise UserError("--out is empty; name a directory, or leave it out")
    return Path(text)


def _recipe_names() -> list[str]:
    """Return what the shell completes after ``--recipe``."""
    from imagenet_fast.recipe.load import shipped

    return list(shipped("recipe"))


def _engine_names() -> list[str]:
    """Return what the shell completes after ``--sync``."""
    from imagenet_fast.recipe.sync_config import engines

    return list(engines())


def _key_values(words: list[str]) -> list[str]:
    """Return the words that no option takes; raise UserError for one without ``=``."""
    for word in words:
        if "=" not in word:
            raise UserError(
                f"{word or '--set'} belongs to no option and is not KEY=VALUE, such as optim.lr=0.5; a recipe is given "
                "by --recipe"
            )
    return words


T = TypeVar("T")
Count = Annotated[T, typer.Option(metavar="N", min=1)]
Names = Annotated[T, typer.Option(metavar="A,B")]
Numbers = Annotated[T, typer.Option(metavar="N,M")]
Seconds = Annotated[T, typer.Option(metavar="SECONDS", min=0)]
Rate = Annotated[T, typer.Option(metavar="RATE")]
Directory = Annotated[T, typer.Option(metavar="DIR")]
RunDirectory = Annotated[Path | None, typer.Option("--out", metavar="DIR", parser=run_directory)]
NewFile = Annotated[T, typer.Option(metavar="FILE", callback=in_a_directory)]
Png = Annotated[Path | None, typer.Option(metavar="FILE", callback=png_file)]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=in_a_directory)]
Recipe = Annotated[T, typer.Option(metavar="NAME|PATH", autocompletion=_recipe_names)]
Sync = Annotated[str | None, typer.Option(metavar="NAME", autocompletion=_engine_names)]
Weights = Annotated[T, typer.Option(metavar="FILE|RUN|RUN@WHICH")]
Endpoint = Annotated[str | None, typer.Option(metavar="HOST:PORT")]
JoinTimeout = Annotated[float, typer.Option(metavar="SECONDS", min=1, max=1e8)]
OnBadImage = Literal["fail", "skip"] | None
Keys = Annotated[list[str], typer.Argument(metavar="KEY=VALUE", callback=_key_values)]
NO_KEYS: list[str] = []
"""Default of keys to change: none."""


def show(
    table: object, rows: object = None, json_file: Path | None = None,
    draw: Callable[[Any], object] | None = None, png: Path | None = None,
) -> None:  # fmt: skip
    """Print a table, write its rows as JSON, and have ``draw`` fill a figure for ``png``, each if there is a file."""
    from rich.console import Console

    from imagenet_fast.metrics.tables import new_figure, write_json

    Console().print(table)
    write_json(rows, json_file)
    if png is not None and draw is not None:
        figure = new_figure()
        draw(figure)
        figure.savefig(png)


def show_rows(
    rows: Sequence[Any], json_file: Path | None, draw: Callable[[Any, Any], object] | None = None,
    png: Path | None = None,
) -> None:  # fmt: skip
    """Show the table of rows, as ``show`` does."""
    from imagenet_fast.metrics.tables import table

    show(table(rows), rows, json_file, draw and partial(draw, rows), png)
