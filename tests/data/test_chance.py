"""Random numbers by name: SplitMix64's, and as good as independent, however their names differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from imagenet_fast.data.chance import bits, uniforms

PICTURES = np.arange(40_000)


def splitmix64(state: int) -> Iterator[int]:
    """The generator as it is published, one number after another."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def test_each_name_picks_a_number_of_the_generator_which_the_one_before_has_picked():
    assert next(splitmix64(1234567)) == 6457827717110365317  # as in other implementations
    expected = 0
    for name in (3, 0, 12):
        expected = next(islice(splitmix64(expected), name, None))
    assert bits(3, 0, 12).tolist() == [expected]
    numbers = [(number >> 11) / 2**53 for number in islice(splitmix64(expected), 5)]
    assert uniforms(5, 3, 0, 12).tolist() == [numbers]


def test_a_number_is_the_same_whoever_asks_for_it_beside_which_others():
    together = uniforms(3, "window", 7, 2, np.array([5, 1_281_166, 0]))
    for row, picture in zip(together, (5, 1_281_166, 0), strict=True):
        assert np.array_equal(uniforms(3, "window", 7, 2, np.array([picture]))[0], row)
        assert np.array_equal(uniforms(3, "window", 7, 2, picture)[0], row)
    assert uniforms(3, "window", 7, 2, PICTURES[:0]).shape == (0, 3)


def test_what_numbers_are_for_tells_them_apart():
    names = [("flip", 1, 2), ("window", 1, 2), ("flip", 2, 1), ("flip", 1), ("flip", 1, 2, 0), (2**31 - 1, 2**63 - 1)]
    assert len({int(bits(*name)[0]) for name in names}) == len(names)


NEIGHBOURS = {
    "pictures": (uniforms(1, "flip", 1, 0, PICTURES)[:, 0], uniforms(1, "flip", 1, 0, PICTURES + 1)[:, 0]),
    "epochs": (uniforms(1, "flip", 1, 0, PICTURES)[:, 0], uniforms(1, "flip", 1, 1, PICTURES)[:, 0]),
    "seeds": (uniforms(1, "flip", 1, 5, PICTURES)[:, 0], uniforms(1, "flip", 2, 5, PICTURES)[:, 0]),
    "purposes": (uniforms(1, "flip", 1, 0, PICTURES)[:, 0], uniforms(1, "window", 1, 0, PICTURES)[:, 0]),
    "numbers": tuple(uniforms(2, "window", 1, 0, PICTURES).T),
    "a seed and an epoch": (uniforms(1, "flip", 1, 2, PICTURES)[:, 0], uniforms(1, "flip", 2, 1, PICTURES)[:, 0]),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_neighbours_are_independent(neighbours: str):
    """Every pair of sixteenths of [0, 1) comes as often as it should: chi-squared of 255 degrees of freedom."""
    one, other = NEIGHBOURS[neighbours]
    counts = np.histogram2d(one, other, bins=16, range=((0, 1), (0, 1)))[0]
    expected = len(PICTURES) / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4 * np.sqrt(2 * 255)
    assert min(one.min(), other.min()) >= 0
    assert max(one.max(), other.max()) < 1
