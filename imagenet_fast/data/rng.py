"""Chance by name: a random number is a function of what it is for, and of nothing drawn before it.

So whoever asks for the number of (seed, epoch, image), on whatever rank, gets the same one, and a run that goes on
where another stopped has nothing to restore.

Each name picks a number of a SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose numbers can be had in any order; that number is the state of the generator which the
next name picks from.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Indices = NDArray[np.int64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def bits(purpose: str, *names: int, of: Indices | int) -> Bits:
    """64 random bits, uint64 [n], for ``of``, [n] integers from 0 on or one; other names are from 0 on too."""
    return _pick(_generator(purpose, *names), np.atleast_1d(np.asarray(of, dtype=np.uint64)))


def uniforms(count: int, purpose: str, *names: int, of: Indices | int) -> NDArray[np.float64]:
    """``count`` random numbers from [0, 1) for each, float64 [n, count]."""
    picked = _pick(bits(purpose, *names, of=of)[:, None], np.arange(count, dtype=np.uint64))
    return (picked >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=16)  # which many small batches ask for
def _generator(purpose: str, *names: int) -> Bits:
    """The state [1] that names lead to."""
    state = np.zeros(1, dtype=np.uint64)
    for name in (zlib.crc32(purpose.encode()), *names):
        state = _pick(state, np.array([name], dtype=np.uint64))
    return state


def _pick(state: Bits, index: Bits) -> Bits:
    """The number at ``index`` of the generator in ``state``; arrays, for these wrap around and NumPy's scalars warn."""
    z: Bits = state + (index + np.uint64(1)) * _GOLDEN_GAMMA
    for shift, factor in _MIXERS:
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> np.uint64(31))
