"""Numbers as text: one or none, lists of whole ones, and bytes, where K, M and G are powers of 1024 as in NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imagenet_fast.errors import UserError, listed

NOTHING = "–"
"""What is shown for a missing value."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

SIZE = r"(\d{1,15})([KMG]?)(?:I?B)?"
"""Pattern of a size in capitals; its groups are the number and the unit."""


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as ``150MB``, in any case, or None if it is 0 or no size."""
    match = re.fullmatch(rf" *{SIZE} *", text.upper(), re.ASCII)
    return int(match[1]) * UNITS[match[2]] or None if match else None


def three_digits(value: float) -> str:
    """Return a number as text with at least three digits, and without an exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def gigabytes(size: float) -> str:
    """Return a size in bytes as text in GB, MB, kB (powers of 1000) or bytes."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"


def size_text(size: int) -> str:
    """Return a size as text that ``parse_size`` reads back, exact to the byte."""
    unit = next(unit for unit in ("G", "M", "K", "") if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]}{unit}B"


def geometric_range(first: int, last: int, factor: int) -> Iterator[int]:
    """Yield ``first``, ``first`` times ``factor`` and so on, and at the end ``last``."""
    while first < last:
        yield first
        first *= factor
    yield last


def whole_numbers(option: str, text: str, example: str, *, zero: bool = False) -> list[int]:
    """Parse a comma-separated list of different whole numbers.

    Args:
        option: Name of the option, for the error message.
        text: The list.
        example: A valid list, for the error message.
        zero: Whether 0 is allowed.

    Raises:
        UserError: ``text`` is no such list.
    """

    def number(part: str) -> int:
        if not (part.isascii() and part.isdigit() and (zero or int(part))):
            above = "" if zero else " above 0"
            raise UserError(f"{option} {text} is not a list of whole numbers{above}; write for example {example}")
        return int(part)

    return listed(option, text, number)


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return ``value`` in the format ``form``, with its unit, or a dash for None."""
    return NOTHING if value is None else f"{value:{form}}{unit}"
