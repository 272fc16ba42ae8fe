"""Random numbers by name: SplitMix64's, and as good as independent, however their names differ."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np

from imagenet_fast.data.rng import bits, uniforms

IMAGES = np.arange(40_000)


def splitmix64(state: int) -> Iterator[int]:
    """The generator as it is published, one number after another."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def chain(state: int, *names: int) -> int:
    for name in names:
        state = next(islice(splitmix64(state), name, None))
    return state


def test_nested_names_pick_generators_in_order():
    assert chain(1234567, 4) == 16408922859458223821  # the fifth number that other implementations have
    state = (zlib.crc32(b"flip") * 0x9E3779B97F4A7C15) % 2**64  # so many numbers after 0
    found = chain(chain(state, 0), 3, 0, 12)
    assert bits("flip", 3, 0, of=12).tolist() == [found]
    numbers = [(number >> 11) / 2**53 for number in islice(splitmix64(found), 5)]
    assert uniforms(5, "flip", 3, 0, of=12).tolist() == [numbers]


def test_a_number_is_the_same_whoever_asks_for_it_beside_which_others():
    together = uniforms(3, "flip", 7, 2, of=np.array([5, 1_281_166, 0]))
    for row, image in zip(together, (5, 1_281_166, 0), strict=True):
        assert np.array_equal(uniforms(3, "flip", 7, 2, of=np.array([image]))[0], row)
        assert np.array_equal(uniforms(3, "flip", 7, 2, of=image)[0], row)
    assert uniforms(3, "flip", 7, 2, of=IMAGES[:0]).shape == (0, 3)


def test_what_numbers_are_for_tells_them_apart():
    names = [("flip", 1, 2), ("crop", 1, 2), ("flip", 2, 1), ("flip", 1), ("flip", 1, 2, 0), ("flip", 2**31 - 1, 2**40)]
    assert len({int(bits(*name, of=of)[0]) for name in names for of in (0, 1, 2**62)}) == 3 * len(names)


def numbers(*names: int, purpose: str = "flip", of: np.ndarray = IMAGES) -> np.ndarray:
    return uniforms(1, purpose, *names, of=of)[:, 0]


NEIGHBOURS = {
    "images": (numbers(1, 0), numbers(1, 0, of=IMAGES + 1)),
    "epochs": (numbers(1, 0), numbers(1, 1)),
    "seeds": (numbers(1, 5), numbers(2, 5)),
    "purposes": (numbers(1, 0), numbers(1, 0, purpose="crop")),
    "numbers of an image": tuple(uniforms(2, "flip", 1, 0, of=IMAGES).T),
    "a seed and an epoch": (numbers(1, 2), numbers(2, 1)),
}


def test_neighbours_are_independent():
    """Every pair of sixteenths of [0, 1) comes as often as it should: chi-squared of 255 degrees of freedom."""
    for neighbours, (one, other) in NEIGHBOURS.items():
        counts = np.histogram2d(one, other, bins=16, range=((0, 1), (0, 1)))[0]
        expected = len(IMAGES) / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4 * np.sqrt(2 * 255), neighbours
        assert min(one.min(), other.min()) >= 0
        assert max(one.max(), other.max()) < 1
