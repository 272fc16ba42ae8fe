"""Sweeps: the values of `--sweep gpus=8..4096` and `--sweep nic=10..400`."""

from __future__ import annotations

import re
from typing import NamedTuple

from imagenet_fast.errors import UserError
from imagenet_fast.units import geometric_range


class Sweep(NamedTuple):
    """Values of ``gpus`` or ``nic``."""

    key: str
    values: tuple[int, ...]


def parse_sweep(text: str) -> Sweep:
    """Parse ``gpus=LIST`` or ``nic=LIST``: numbers and ranges; 8..64 doubles from 8 to 64, 8..64:4 multiplies by 4.

    Raises:
        UserError: It is no such sweep.
    """
    key, _, numbers = text.partition("=")
    values: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r" *(\d{1,6})(?:\.\.(\d{1,6})(?::(\d{1,3}))?)? *", part, re.ASCII)
        if key not in ("gpus", "nic") or match is None:
            raise UserError(f"--sweep {text} is no sweep; write gpus=8..4096, gpus=8,64,512 or nic=10..400 (Gbit/s)")
        first, last, by = int(match[1]), int(match[2] or match[1]), int(match[3] or 2)
        if not 0 < first <= last or by < 2:
            raise UserError(
                f"--sweep {text}: ranges go up from 1 or more, by a factor of 2 or more; correct {part.strip()}"
            )
        values |= set(geometric_range(first, last, by))
    return Sweep(key, tuple(sorted(values)))
