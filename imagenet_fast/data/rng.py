"""Draw random numbers by name: a number is a function of its purpose, not of what was drawn before.

So every rank gets the same number for (seed, epoch, image), and a resumed run has no generator state to restore.

Each name picks a number of a SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose numbers can be computed in any order. That number is the state of the generator that
the next name picks from.
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
    """Return 64 random bits for each integer in ``of``, uint64 [n].

    Args:
        purpose: What the bits are for, such as "augmentation".
        *names: Integers of at least 0, such as a seed and an epoch.
        of: Integers of at least 0, [n] or a single one, such as indices of images.
    """
    return _pick(_generator(purpose, *names), np.atleast_1d(np.asarray(of, dtype=np.uint64)))


def uniforms(count: int, purpose: str, *names: int, of: Indices | int) -> NDArray[np.float64]:
    """Return ``count`` random numbers from [0, 1) for each integer in ``of``, float64 [n, count]; see ``bits``."""
    picked = _pick(bits(purpose, *names, of=of)[:, None], np.arange(count, dtype=np.uint64))
    return (picked >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=16)  # many small batches ask for the same one
def _generator(purpose: str, *names: int) -> Bits:
    """Return the generator state, uint64 [1], that the names pick."""
    state = np.zeros(1, dtype=np.uint64)
    for name in (zlib.crc32(purpose.encode()), *names):
        state = _pick(state, np.array([name], dtype=np.uint64))
    return state


def _pick(state: Bits, index: Bits) -> Bits:
    """Return the number at ``index`` of a generator; only for arrays, since NumPy scalars warn when they wrap."""
    z: Bits = state + (index + np.uint64(1)) * _GOLDEN_GAMMA
    for shift, factor in _MIXERS:
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> np.uint64(31))
