"""Load a validated recipe from a name or a TOML file, and the command line's overrides."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from imagenet_fast.errors import UserError, did_you_mean, listed, warn
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.engine_table import Codes, CodingTable
from imagenet_fast.recipe.key_reference import table_keys
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import Sync, engines

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
        raise UserError(f"{source}: {_explain(root, _first(error))}") from None


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
        found = {"value": None} if text.strip() == "none" else tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # text without quotes, a number too long, nesting too deep
        found = {"value": text}
    if found.keys() != {"value"}:
        raise UserError(f"{_shortened(override)} sets several keys; write one KEY=VALUE for each")
    table = tables
    for folder in folders:
        if not isinstance(table.get(folder), dict):
            table[folder] = {}
        table = table[folder]
    table[leaf] = found["value"]


_MEMBER = re.compile(r"bool|int|float|str|constrained-\w+|(?:function-\w+|literal)\[.*\]", re.DOTALL)
"""Names of types that pydantic adds to the path of a key with several types."""


def _first(error: ValidationError) -> ErrorDetails:
    """Return the first error, or those of a key that may have several types as one."""
    first, *others = error.errors()
    place = first["loc"][:-1]
    if not place or not _MEMBER.fullmatch(str(first["loc"][-1])):
        return first
    said = dict.fromkeys(one["msg"] for one in (first, *others) if one["loc"][:-1] == place)
    return {**first, "loc": place, "msg": " or ".join(said).replace(" or Input should be", " or")}


def _explain(root: type[Table], error: ErrorDetails) -> str:
    """Return one pydantic error in the tables of ``root`` as a sentence with the key's path and a fix."""
    path = [str(part) if str(part).isprintable() else repr(part) for part in error["loc"]]
    given = path.pop(1) if len(path) > 1 and _discriminator(root, path[0]) else ""  # pydantic puts the kind there
    key = ".".join(path)
    context = error.get("ctx", {})
    tag = f"{key}.{str(context.get('discriminator')).strip(chr(39))}"
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
