"""Say in a sentence which key of a recipe has a wrong value, or is wrong itself, and what to do about it."""

from __future__ import annotations

import json
import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from imagenet_fast.errors import did_you_mean
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.key_reference import table_keys


def explain(root: type[Table], errors: ValidationError) -> str:
    """Return the first of pydantic's errors in the tables of ``root`` as a sentence with the key's path and a fix."""
    error = _first(errors)
    path = [str(part) if str(part).isprintable() else repr(part) for part in error["loc"]]
    given = path.pop(1) if len(path) > 1 and _discriminator(root, path[0]) else ""  # pydantic puts the kind there
    key = ".".join(path)
    context = error.get("ctx", {})
    tag = f"{key}.{_discriminator(root, key)}"
    match error["type"]:
        case "extra_forbidden":
            return _explain_unknown(root, key, given)
        case _ if error["input"] is None:  # KEY=none
            return f"{key} cannot be none, which is for keys that may be absent; give it a value, or leave it out"
        case "union_tag_invalid":
            return f"{tag} is {_shortened(repr(context['tag']))}; it must be one of {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{tag} is missing; name which {key} is meant"
        case "missing":
            return f"{key} is missing; add it"
        case "value_error":
            why = str(context["error"])
            return f"{key + ': ' if key else ''}{why}{'' if '; ' in why else '; change one of them'}"
        case "json_invalid":  # the JSON is made here, so nothing else can be wrong with it
            return "a value in it is not UTF-8, or arrays lie in one another too deeply; correct it"
        case _:
            found = _shortened(json.dumps(error["input"], default=str))
            return f"{key} is {found}: {error['msg'][0].lower()}{error['msg'][1:]}; {_fix(root, key, error)}"


_MEMBER = re.compile(r"bool|int|float|str|constrained-\w+|(?:function-\w+|literal)\[.*\]", re.DOTALL)
"""Names of types that pydantic adds to the path of a key with several types."""


def _first(error: ValidationError) -> ErrorDetails:
    """Return the first error, or those of a key that may have several types as one."""
    first, *others = sorted(error.errors(), key=lambda one: one["type"] == "missing")  # of a misspelt key, too
    place = first["loc"][:-1]
    if not place or not _MEMBER.fullmatch(str(first["loc"][-1])):
        return first
    said = dict.fromkeys(one["msg"] for one in (first, *others) if one["loc"][:-1] == place)
    return {**first, "loc": place, "msg": " or ".join(said).replace(" or Input should be", " or")}


def _explain_unknown(root: type[Table], key: str, given: str) -> str:
    """Return a sentence about a key that its table does not have, which is of the kind ``given`` if it has kinds."""
    known: dict[str, tuple[str, ...]] = {}
    for one in table_keys(root):  # several kinds may have one of that name, each with its own meaning
        known[one.name] = known.get(one.name, ()) + one.kinds
    table, dot, leaf = key.rpartition(".")
    inside = [name for name, kinds in known.items() if name.startswith(table + dot) and (not kinds or given in kinds)]
    here = dict.fromkeys(name.removeprefix(table + dot).partition(".")[0] for name in inside)
    others = dict.fromkeys(kind for name in known if f"{name}.".startswith(f"{key}.") for kind in known[name])
    if table and others and "options" not in here:
        by = _discriminator(root, table)
        return (
            f"{key} is for {table}.{by} {' or '.join(map(repr, others))}, not {given!r}; leave it out, or replace the "
            f"whole table, as by --set '{table}={{{by}=\"{given}\", ...}}'"
        )
    if not dot and (elsewhere := [name for name in known if name.endswith(f".{key}")]):
        return f"unknown key {key}; did you mean {' or '.join(elsewhere)}?"
    near = did_you_mean(leaf, here, f"the keys here are {', '.join(here)}", 1, 0.4, table + dot)
    return f"unknown key {key}; {near}"


def _fix(root: type[Table], key: str, error: ErrorDetails) -> str:
    """Return what to do about a value of a wrong type."""
    match error["type"]:
        case "bool_parsing" | "bool_type" if " or " not in error["msg"]:
            fix = "write true or false"
        case "float_parsing" | "float_type" if isinstance(error["input"], str) and " or " not in error["msg"]:
            fix = "write digits before and after the point, as in 0.5 or 1e-4"
        case "model_type" | "model_attributes_type" | "dict_type":
            fix = f"it is a table, so write {key}.{_discriminator(root, key) or 'KEY'}=VALUE"
        case _:
            fix = "correct it"
    optional = any((one.name, one.default) == (key, "absent") for one in table_keys(root))
    return f"{fix}, or leave it out (KEY=none)" if optional else fix


def _shortened(found: str) -> str:
    """Return ``found`` cut to 100 characters, for an error message."""
    return found if len(found) <= 100 else f"{found[:100]} ..."


def _discriminator(root: type[Table], field: str) -> str:
    """Return the key that chooses the table of the union at ``field``; empty if there is no union."""
    return str(root.model_fields[field].discriminator or "") if field in root.model_fields else ""
