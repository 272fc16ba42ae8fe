"""YAML 1.2 (https://yaml.org/spec/1.2.2) of mappings, lists, text and numbers, which readers of 1.1 take alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

Yaml: TypeAlias = "dict[str, Yaml] | list[Yaml] | str | int | bool"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # which YAML does not take for text


def to_yaml(document: dict[str, Yaml]) -> str:
    """One document in block style. No mapping and no list in it may be empty."""
    return "".join(f"{line}\n" for line in _lines(document))


def _lines(value: Yaml) -> Iterator[str]:
    """A mapping or a list as YAML in block style; neither may be empty."""
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
    """Whether text of several lines can stand as it is, indented."""
    *lines, last = text.split("\n")
    whole = bool(lines) and not last and bool(lines[-1])
    return whole and lines[0][:1] not in ("", " ") and "".join(lines).isprintable()


def _scalar(value: Yaml) -> str:
    """Text is quoted unless it can be nothing else; what does not print is escaped, as line breaks of Unicode are."""
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
    if character.isprintable() or "\ud800" <= character <= "\udfff":  # half of a pair has no form, and is refused later
        return character
    return "\\n" if character == "\n" else f"\\U{ord(character):08x}"
