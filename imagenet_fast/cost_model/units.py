"""Numbers of bytes as people write them: K, M and G are powers of 1024, as in nccl-tests."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

SIZE = r"(\d{1,15})([KMG]?)(?:I?B)?"
"""Matches one, in capitals: its number and its unit."""


def parse_size(text: str) -> int | None:
    """The bytes of ``150MB``, in whatever case; None where that is no size, or 0."""
    match = re.fullmatch(rf" *{SIZE} *", text.upper(), re.ASCII)
    return int(match[1]) * UNITS[match[2]] or None if match else None


def size_text(size: int) -> str:
    """As 2 KB, of 1024 bytes each."""
    for unit in ("G", "M", "K"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.4g} {unit}B"
    return f"{size} B"


def exact_size(size: int) -> str:
    """As :func:`parse_size` reads it, to the byte."""
    unit = next(unit for unit in ("G", "M", "K", "") if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]}{unit}B"
