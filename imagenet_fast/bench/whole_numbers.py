"""Parse lists of whole numbers from options."""

from __future__ import annotations

from imagenet_fast.errors import UserError


def whole_numbers(option: str, text: str, example: str, *, zero: bool = False) -> list[int]:
    """Parse a comma-separated list of whole numbers.

    Args:
        option: Name of the option, for the error message.
        text: The list.
        example: A valid list, for the error message.
        zero: Whether 0 is allowed.

    Raises:
        UserError: ``text`` is no such list.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and (zero or int(part)) for part in parts):
        above = "" if zero else " above 0"
        raise UserError(f"{option} {text} is not a list of whole numbers{above}; write for example {example}")
    return [int(part) for part in parts]
