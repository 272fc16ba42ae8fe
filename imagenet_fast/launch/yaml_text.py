"""Write mappings, lists, text and numbers as YAML 1.2 (https://yaml.org/spec/1.2.2) that reads the same in 1.1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

Yaml: TypeAlias = "dict[str, Yaml] | list[Yaml] | str | int | bool"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # that YAML does not read as text


def to_yaml(document: dict[str, Yaml]) -> str:
    """Return one document in block style. No mapping or list in it may be empty."""
    return "".join(f"{line}\n" for line in _lines(document))


def _lines(value: Yaml) -> Iterator[str]:
    """Format a mapping or a list as YAML in block style; neither may be empty."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _entry(f"{_scalar(key)}:", inner)
        case list():
            for inner in value:
                if isinstance(inner, dict | list):
                    first, *rest = _lines(inner)
                    yield f"- {first}"
                    yield from (f"  {line}" for line in rest)
                else:
                    yield f"- {_scalar(inner)}"
        case _:
            yield _scalar(value)


def _entry(key: str, value: Yaml) -> Iterator[str]:
    match value:
        case dict() | list():
            yield key
            yield from (f"  {line}" for line in _lines(value))
        case str() if _is_block(value):
            yield f"{key} |"
            yield from (f"  {line}" for line in value.removesuffix("\n").split("\n"))
        case _:
            yield f"{key} {_scalar(value)}"


def _is_block(text: str) -> bool:
    """Return whether text of several lines can be written as an indented block, without quotes."""
    *lines, last = text.split("\n")
    whole = bool(lines) and not last and bool(lines[-1])
    return whole and lines[0][:1] not in ("", " ") and "".join(lines).isprintable()


def _scalar(value: Yaml) -> str:
    """Format a scalar: quote text that may have another type, and escape unprintable characters such as U+2028."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        case _:
            return f'"{"".join(map(_escaped, str(value)))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable() or "\ud800" <= character <= "\udfff":  # a lone surrogate is rejected later
        return character
    return "\\n" if character == "\n" else f"\\U{ord(character):08x}"
