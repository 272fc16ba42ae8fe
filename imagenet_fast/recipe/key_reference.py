"""List every key of a recipe with its type, range, default and meaning, as the schema has them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from imagenet_fast.errors import UserError, did_you_mean
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.schema import Recipe

_CHOICES = ("kind", "loader")  # keys that choose which other keys their table has


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
    """Default as TOML; or "required", "absent", or "derived" from other keys."""
    meaning: str
    """One sentence or a few, in Markdown."""


def recipe_keys(prefix: str = "") -> list[Key]:
    """Return the keys whose name is ``prefix`` or begins with it, in the order of the schema.

    Args:
        prefix: A key, a table or the beginning of a key; empty: all keys.

    Raises:
        UserError: No key begins with ``prefix``.
    """
    keys = sorted(_merged(_of_table(Recipe, "", ())), key=_place)
    found = [key for key in keys if key.name.startswith(prefix)]
    if not found:
        near = did_you_mean(prefix, {key.name for key in keys}, "`imagenet-fast recipes keys` lists all")
        raise UserError(f"no recipe key begins with '{prefix}'; {near}")
    return found


def _place(key: Key) -> tuple[int, bool]:
    """Sort by table, as in the schema; what chooses the other keys comes first in its table."""
    tables = [
        name for name, field in Recipe.model_fields.items() if any(map(_is_table, _alternatives(field.annotation)))
    ]
    head = key.name.partition(".")[0]
    return tables.index(head) + 1 if head in tables else 0, key.name.rpartition(".")[2] not in _CHOICES


def _of_table(table: type[Table], path: str, kinds: tuple[str, ...]) -> Iterator[Key]:
    for name, field in table.model_fields.items():
        if field.exclude:
            continue
        variants = [inner for inner in _alternatives(field.annotation) if _is_table(inner)]
        for inner in variants:
            yield from _of_table(inner, f"{path}{name}.", _kinds(inner) if len(variants) > 1 else ())
        if variants:
            continue
        meaning = " ".join(_description(table, name).replace("``", "`").split())
        if name in _CHOICES and kinds:
            meaning = (field.description or "").replace("``", "`")
            listed = " and ".join(f"`{kind}`" for kind in kinds)
            yield Key(path + name, (), _type(field), "required", meaning or f"{listed}: {_summary(table)}")
        else:
            yield Key(path + name, kinds, _type(field), _default(field), meaning)


def _description(table: type[Table], name: str) -> str:
    """Return the key's docstring, from the base class where the table only changes the type or the default."""
    bases = (base for base in table.__mro__ if issubclass(base, Table))
    return next(
        (text for base in bases if name in base.model_fields and (text := base.model_fields[name].description)), ""
    )


def _merged(keys: Iterator[Key]) -> Iterator[Key]:
    """Yield one key where several kinds of a table have the same, and one ``kind`` with all its values."""
    merged: dict[tuple[str, ...], Key] = {}
    for key in keys:
        if key.name.rpartition(".")[2] in _CHOICES:
            place: tuple[str, ...] = (key.name,)
            if (before := merged.get(place)) is not None:
                key = replace(key, type=f"{before.type}, {key.type}", meaning=f"{before.meaning} {key.meaning}")
        else:
            place = (key.name, key.type, key.default, key.meaning)
            if (before := merged.get(place)) is not None:
                key = replace(before, kinds=before.kinds + key.kinds)
        merged[place] = key
    for key in merged.values():
        table = key.name.rpartition(".")[0]
        choices = next((other.type for other in merged.values() if other.name == f"{table}.kind"), "")
        yield replace(key, kinds=()) if key.kinds and choices.count(",") + 1 == len(key.kinds) else key


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, or the type itself, without what ``Annotated`` adds."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _alternatives(member)]
    return [annotation]


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def _kinds(table: type[Table]) -> tuple[str, ...]:
    choice = next((field for name, field in table.model_fields.items() if name in _CHOICES), None)
    return get_args(choice.annotation) if choice is not None else ()


def _summary(table: type[Table]) -> str:
    return (inspect.getdoc(table) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _type(field: FieldInfo) -> str:
    return _named(field.annotation, field.metadata)


def _named(annotation: Any, metadata: Any = ()) -> str:
    """Describe a type, with the range that ``metadata`` gives numbers."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        unpacked = [part for one in more for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return _named(inner, [*metadata, *unpacked])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_named(member, metadata) for member in get_args(annotation) if member is not NoneType)
    if get_origin(annotation) is Literal:
        return ", ".join(f'"{value}"' for value in get_args(annotation))
    if get_origin(annotation) is dict:
        return "table of values"
    if get_origin(annotation) is tuple:
        members = get_args(annotation)
        if members[-1] is Ellipsis:
            return (
                f"list of [{_named(members[0])}]"
                if get_origin(members[0]) is tuple
                else f"list of {_named(members[0])}"
            )
        return ", ".join(_named(member) for member in members)
    words = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return words[annotation] + _range(metadata)


def _range(metadata: Any) -> str:
    said = []
    for part in metadata:
        match part:
            case annotated_types.Ge(ge=bound):
                said.append(f"≥ {bound}")
            case annotated_types.Gt(gt=bound):
                said.append(f"> {bound}")
            case annotated_types.Le(le=bound):
                said.append(f"≤ {bound}")
            case annotated_types.Lt(lt=bound):
                said.append(f"< {bound}")
            case _:
                pass
    return " " + ", ".join(said) if said else ""


def _default(field: FieldInfo) -> str:
    match field.default:
        case _ if field.is_required():
            return "required"
        case _ if field.default_factory is not None:
            return "derived"
        case None:
            return "absent"
        case bool() as flag:
            return "true" if flag else "false"
        case str() as text:
            return f'"{text}"'
        case tuple() as values:
            return f"[{', '.join(map(str, values))}]"
        case float() as number:
            return "inf" if math.isinf(number) else f"{number:g}"
        case other:
            return str(other)
