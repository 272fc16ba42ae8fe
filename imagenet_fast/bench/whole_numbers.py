"""Lists of whole numbers, as options take them."""

from __future__ import annotations

from imagenet_fast.errors import UserError


def whole_numbers(option: str, text: str, example: str, *, zero: bool = False) -> list[int]:
    """The numbers of a list such as ``example``: above 0, or with ``zero`` that too. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and (zero or int(part)) for part in parts):
        above = "" if zero else " above 0"
        raise UserError(f"{option} {text} is not a list of whole numbers{above}; write for example {example}")
    return [int(part) for part in parts]
