"""List every key of a recipe, or of other tables, with its type, range, default and meaning, from the JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from imagenet_fast.errors import UserError, did_you_mean
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.schema import Recipe

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""


@dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    name: str
    """As ``--set`` takes it, with its tables: ``optim.lr``."""
    kinds: tuple[str, ...]
    """Values of its table's ``kind`` that have it; empty: all."""
    type: str
    """Type and range."""
    default: str
    """Default as TOML; or "required" or "absent"."""
    meaning: str
    """One sentence or a few, in Markdown."""


def recipe_keys(prefix: str = "") -> list[Key]:
    """Return the keys whose name is ``prefix`` or begins with it, in the order of the schema.

    Args:
        prefix: A key, a table or the beginning of a key; empty: all keys.

    Raises:
        UserError: No key begins with ``prefix``.
    """
    keys = sorted(table_keys(Recipe), key=lambda key: "." in key.name)
    found = [key for key in keys if key.name.startswith(prefix)]
    if not found:
        near = did_you_mean(prefix, {key.name for key in keys}, "`imagenet-fast recipes keys` lists all")
        raise UserError(f"no recipe key begins with '{prefix}'; {near}")
    return found


@cache
def table_keys(root: type[Table]) -> tuple[Key, ...]:
    """Return the keys of ``root`` and of the tables in it, in the order of the schema."""
    schema = root.model_json_schema()
    return tuple(_keys(schema, schema["$defs"], ""))


def _keys(table: Schema, tables: Schema, path: str) -> Iterator[Key]:
    """Yield the keys of a table and of the tables in it, which ``tables`` has by name."""
    for name, field in table["properties"].items():
        inner = [tables[one["$ref"].rpartition("/")[2]] for one in field.get("oneOf", [field]) if "$ref" in one]
        if "discriminator" in field:
            yield from _keys_of_kinds(inner, field["discriminator"]["propertyName"], tables, f"{path}{name}.")
        elif inner:
            yield from _keys(inner[0], tables, f"{path}{name}.")
        else:
            meaning = _prose(field.get("description", ""))
            yield Key(path + name, (), _type(field), _default(field), meaning)


def _keys_of_kinds(kinds: list[Schema], choice: str, tables: Schema, path: str) -> Iterator[Key]:
    """Yield the key that chooses a table's kind, then its other keys: one where several kinds have the same."""
    types: list[str] = []
    meanings: list[str] = []
    merged: dict[Key, list[str]] = {}
    for kind in kinds:
        chosen = kind["properties"][choice]
        names = chosen.get("enum") or [chosen["const"]]
        types += names
        listed = " and ".join(f"`{name}`" for name in names)
        meanings.append(
            chosen.get("description") or f"{listed}: {kind.get('description', '').partition(chr(10) * 2)[0]}"
        )
        for key in _keys(kind, tables, path):
            merged[key] = [*merged.get(key, []), *names]
    yield Key(path + choice, (), _listed(types), "required", _prose(" ".join(meanings)))
    for key, having in merged.items():
        if key.name != path + choice:
            yield replace(key, kinds=() if len(having) == len(types) else tuple(having))


def _prose(text: str) -> str:
    """Return a docstring as Markdown on one line."""
    return " ".join(text.replace("``", "`").split())


def _listed(values: list[str]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def _type(field: Schema) -> str:
    """Return the type of a value in words, and its range."""
    match field:
        case {"anyOf": members}:
            return " or ".join(_type(member) for member in members if member != {"type": "null"})
        case {"enum": values}:
            return _listed(values)
        case {"const": value}:
            return _listed([value])
        case {"prefixItems": members}:
            return ", ".join(map(_type, members))
        case {"items": {"prefixItems": _} as member}:
            return f"list of [{_type(member)}]"
        case {"items": member}:
            return f"list of {_type(member)}"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {field[limit]}" for limit, sign in signs.items() if limit in field)
    return f"{words.get(field.get('type', ''), 'table of values')} {limits}".rstrip()


def _default(field: Schema) -> str:
    """Return the default of a value as TOML."""
    if "default" not in field:
        return "required"
    return "absent" if field["default"] is None else json.dumps(field["default"])
