"""Files as disks, networks and people leave them."""

from __future__ import annotations

import random
import re


def corrupted(whole: bytes, chance: random.Random) -> bytes:
    """Other bytes, or fewer, or more."""
    place = chance.randrange(len(whole))
    noise = chance.randbytes(min(64, len(whole) - place))
    return chance.choice([
        whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :],
        whole[:place],
        whole[:place] + noise + whole[place + len(noise) :],
        whole[:place] + bytes(len(whole) - place),
        whole + noise,
        chance.randbytes(len(whole)),
    ])  # fmt: skip


def with_another_value(text: bytes, chance: random.Random) -> bytes:
    """JSON with one value that is another, or no JSON."""
    values = ["NaN", "Infinity", "1e999", "9" * 5000, "-1", "null", "[" * 9999, '"', '"x"', "{}", "2.0", "true"]
    start, stop = chance.choice(list(re.finditer(rb'": [^,}\n]+', text))).span()
    return text[:start] + b'": ' + chance.choice(values).encode() + text[stop:]
