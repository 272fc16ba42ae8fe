"""Load a validated recipe from a name or a TOML file, and the command line's overrides."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import ValidationError

from imagenet_fast.errors import UserError, did_you_mean, listed, warn
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import Sync, engines
from imagenet_fast.recipe.sync_table import Codes, CodingTable
from imagenet_fast.recipe.validation_error import explain

Kind = Literal["recipe", "cluster"]
"""A kind of TOML file; some of each are shipped."""
Root = TypeVar("Root", bound=Table)


def shipped(kind: Kind) -> dict[str, Path]:
    """Return the shipped files of a kind by name: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    folder = next(folder for folder in (package / f"{kind}s", package.parent / f"{kind}s") if folder.is_dir())
    return dict(sorted((path.stem, path) for path in folder.glob("*.toml") if path.stem != "published"))


def find_file(kind: Kind, name: str) -> Path:
    """Return the file of a recipe or a cluster, given the name of a shipped one or a path.

    Raises:
        UserError: There is no such file. The message suggests the nearest names.
    """
    path, known = Path(name), shipped(kind)
    there = f"there are {', '.join(known)}, or give a path to a .toml file"
    if path.suffix == ".toml" or path.is_absolute() or len(path.parts) > 1:
        if path.is_file():
            return path
        raise UserError(f"there is no {kind} file {path}; {there}")
    if name in known:
        return known[name]
    raise UserError(f"there is no {kind} '{name}'; {did_you_mean(name, known, there)}")


def read_text(path: Path) -> str:
    """Return the text of a file, without a byte order mark. Raises UserError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it as UTF-8") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises UserError if it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, a number too long, nesting too deep
        raise UserError(f"{path} cannot be read as TOML ({error}); correct it there") from None


def load_recipe(
    name: str | Path, sync: str | None = None, overrides: Sequence[str] = (), tell: Callable[[str], object] = warn
) -> Recipe:
    """Read and validate a recipe.

    Args:
        name: Name of a shipped recipe, or a TOML file.
        sync: An engine that replaces the recipe's; of the recipe's ``[sync]`` table only ``wire`` is kept, or bf16
            taken instead of 8-bit codes if the engine does not send these.
        overrides: ``KEY=VALUE`` pairs, applied after ``sync``; the value ``none`` is that of an absent key.
        tell: Called with a warning if bf16 is taken.

    Raises:
        UserError: There is no such recipe, or a value is wrong. The message names the first wrong key and a fix.
    """
    path = find_file("recipe", str(name))
    tables = read_toml(path)
    if sync is not None:
        old = tables.get("sync")
        tables["sync"] = {"kind": sync} | ({"wire": old["wire"]} if isinstance(old, dict) and "wire" in old else {})
    for override in overrides:
        _override(tables, override)
    own, engine = tables.get("sync"), engines().get(sync or "", CodingTable)
    if isinstance(own, dict) and own.get("wire") in get_args(Codes) and not issubclass(engine, CodingTable):
        tell(f"--sync {sync} does not send in {own['wire']}, which sync.wire is; it sends in bf16")
        own["wire"] = "bf16"
    return parse_recipe(path.name, tables)


def parse_recipe(source: str, tables: dict[str, Any]) -> Recipe:
    """Validate a recipe's tables; as ``validated``."""
    return validated(Recipe, source, tables)


def validated(root: type[Root], source: str, tables: dict[str, Any]) -> Root:
    """Return tables as a ``root``.

    Raises:
        UserError: A value is wrong. The message names ``source`` and the first wrong key.
    """
    try:
        # Through JSON: strict mode accepts a JSON array for a tuple, but not a Python list.
        return root.model_validate_json(json.dumps(tables, default=str))
    except ValidationError as error:
        raise UserError(f"{source}: {explain(root, error)}") from None


class _OnlySync(Table):
    """A recipe of nothing but its ``[sync]`` table."""

    sync: Sync


def parse_engines(text: str, wire: str, overrides: Sequence[str] = ()) -> list[Sync]:
    """Parse a list of engines like ``ddp:fp32,lazy``.

    Args:
        text: Engines, comma-separated, each with its wire dtype after a colon, or without.
        wire: The wire dtype of engines that name none.
        overrides: ``ENGINE.KEY=VALUE`` pairs.

    Raises:
        UserError: A name or a value is wrong, or an engine is named twice with equal settings.
    """
    kinds = [name.partition(":")[0].strip() for name in text.split(",")]
    changes: dict[str, Any] = {}
    for override in overrides:
        table, dot, _ = override.partition("=")[0].partition(".")
        if not dot or table not in kinds:
            raise UserError(f"--set {override} is not ENGINE.KEY=VALUE with an engine of --sync {text}; correct one")
        _override(changes, override)

    def engine(name: str) -> Sync:
        kind, _, own_wire = name.partition(":")
        settings = {"kind": kind, "wire": own_wire or wire, **changes.get(kind, {})}
        told = [f"--sync {kind}:{own_wire or wire}", *(f"--set {o}" for o in overrides if o.startswith(f"{kind}."))]
        return validated(_OnlySync, " ".join(told), {"sync": settings}).sync

    return listed("--sync", text, engine)


def to_toml(recipe: Recipe) -> str:
    """Return the recipe as TOML with every default written out."""
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def _override(tables: dict[str, Any], override: str) -> None:
    """Set one ``KEY=VALUE`` in ``tables``; raise UserError if it is malformed."""
    key, equals, text = override.partition("=")
    *folders, leaf = key.strip().split(".")
    if not equals or not leaf or "" in folders:
        raise UserError(f"{override} is not KEY=VALUE; write for example optim.lr=0.5")
    try:
        value = None if text.strip() == "none" else tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # text without quotes, a number too long, nesting too deep
        value = text
    table = tables
    for folder in folders:
        if not isinstance(table.get(folder), dict):
            table[folder] = {}
        table = table[folder]
    table[leaf] = value
