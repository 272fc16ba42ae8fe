"""From a name or a TOML file, and the command line's overrides, to a validated recipe."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import Sync


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe's name, or of a path to one. Raises UserError with the nearest names."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_absolute() or len(path.parts) > 1:
        if path.is_file():
            return path
        raise UserError(
            f"there is no recipe file {path}; give a path to a .toml file, or a name from `imagenet-fast recipes`"
        )
    names = recipe_names()
    if name in names:
        return recipe_folder() / f"{name}.toml"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    raise UserError(
        f"there is no recipe '{name}'; " + (_did_you_mean(near) if near else f"there are {', '.join(names)}")
    )


def load_recipe(path: Path, sync: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe, after ``sync`` has replaced its engine and KEY=VALUE its values.

    Raises UserError naming the first key that is wrong and what it could be instead.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, not text, a number too long, tables too deep
        raise UserError(f"{path} cannot be read as TOML ({error}); correct it there") from None
    if sync is not None:
        old = tables.get("sync")
        tables["sync"] = {"kind": sync} | ({"wire": old["wire"]} if isinstance(old, dict) and "wire" in old else {})
    for override in overrides:
        _override(tables, override)
    return parse_recipe(path.name, tables)


def parse_recipe(source: str, tables: dict[str, Any]) -> Recipe:
    """Validate a recipe's tables. Raises UserError naming ``source`` and the first key that is wrong."""
    try:
        # By way of JSON, since strict mode takes a JSON array, but not a Python list, for a tuple.
        return Recipe.model_validate_json(json.dumps(tables, default=str))
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error.errors()[0])}") from None


def engine_names() -> list[str]:
    """What ``sync.kind`` can be."""
    return [get_args(member.model_fields["kind"].annotation)[0] for member in get_args(get_args(Sync)[0])]


class _OnlySync(Table):
    sync: Sync


def parse_engines(text: str, wire: str, overrides: Sequence[str] = ()) -> list[Sync]:
    """Engines named like ``ddp:fp32,lazy``: ``wire`` where none is given, then ENGINE.KEY=VALUE overrides.

    Raises UserError as :func:`parse_recipe` does.
    """
    names = [name.strip().partition(":") for name in text.split(",")]
    changes: dict[str, Any] = {}
    for override in overrides:
        table, dot, _ = override.partition("=")[0].partition(".")
        if not dot or table not in (kind for kind, _, _ in names):
            raise UserError(f"--set {override} is not ENGINE.KEY=VALUE with an engine of --sync {text}; correct one")
        _override(changes, override)
    engines: list[Sync] = []
    for kind, _, own_wire in names:
        settings = {"kind": kind, "wire": own_wire or wire, **changes.get(kind, {})}
        try:
            engine = _OnlySync.model_validate_json(json.dumps({"sync": settings})).sync
        except ValidationError as error:
            raise UserError(f"--sync {text}: {_explain(error.errors()[0])}") from None
        if engine in engines:
            raise UserError(f"--sync {text} names {kind} twice; leave one out")
        engines.append(engine)
    return engines


def to_toml(recipe: Recipe) -> str:
    """The recipe with every default written out."""
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def _override(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *folders, leaf = key.strip().split(".")
    if not equals or not leaf:
        raise UserError(f"--set {override} is not KEY=VALUE; write for example --set optim.lr=0.5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tables
    for folder in folders:
        table = table.setdefault(folder, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {folder} is a value, not a table; the keys are {_keys(Recipe)}")
    table[leaf] = value


def _explain(error: ErrorDetails) -> str:
    """One of pydantic's findings as a sentence with the path and the fix."""
    location = [str(part) for part in error["loc"]]
    table: type[BaseModel] = Recipe
    path = location
    if len(location) > 1 and location[0] in Recipe.model_fields:
        annotation = Recipe.model_fields[location[0]].annotation
        if isinstance(annotation, type) and issubclass(annotation, Table):
            table = annotation
        else:  # inside a union pydantic adds the member's tag
            table = _member(location[0], location[1])
            path = [location[0], *location[2:]]
    key = ".".join(path)
    context = error.get("ctx", {})
    tag = f"{key}.{str(context.get('discriminator')).strip(chr(39))}"
    match error["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(path[-1], table.model_fields, n=1, cutoff=0.4)
            prefix = key.removesuffix(path[-1])
            return f"unknown key {key}; " + (
                _did_you_mean([prefix + near[0]]) if near else f"the keys here are {_keys(table)}"
            )
        case "union_tag_invalid":
            return f"{tag} is {_shortened(repr(context['tag']))}; it must be one of {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{tag} is missing; name which {key} is meant"
        case "missing":
            return f"{key} is missing; add it"
        case "value_error":
            why = str(context["error"])
            return f"{key + ': ' if key else ''}{why}{'' if '; ' in why else '; change one of them'}"
        case "json_invalid":  # the JSON is our own, and cannot be wrong otherwise
            return "its arrays or tables lie in one another too deeply; correct them"
        case _:
            found = _shortened(json.dumps(error["input"], default=str))
            return f"{key} is {found}: {error['msg'][0].lower()}{error['msg'][1:]}; correct it"


def _shortened(found: str) -> str:
    """For a sentence."""
    return found if len(found) <= 100 else f"{found[:100]} ..."


def _member(field: str, tag: str) -> type[BaseModel]:
    """The table of the union at ``field`` whose literal tag is ``tag``."""
    for member in get_args(Recipe.model_fields[field].annotation):
        for inner in member.model_fields.values():
            if get_origin(inner.annotation) is Literal and tag in get_args(inner.annotation):
                found: type[BaseModel] = member
                return found
    return Recipe


def _keys(table: type[BaseModel]) -> str:
    return ", ".join(table.model_fields)


def _did_you_mean(names: Iterable[str]) -> str:
    return f"did you mean {' or '.join(names)}?"
