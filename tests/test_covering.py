"""The cases of a covering try every pair, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (5, 3, 3), (2,) * 10, (20, 9, 7, 4, 3, 3), (1, 4, 1, 4)])
def test_every_pair_of_choices_is_in_a_row(sizes: tuple[int, ...]):
    axes = [[f"{axis}:{n}" for n in range(size)] for axis, size in enumerate(sizes)]
    rows = covering(*axes)
    met = {pair for row in rows for pair in combinations(row, 2)}
    assert met == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    largest = sorted(sizes)[-2:]
    least = largest[0] * largest[1] if len(sizes) > 1 else 0
    assert least <= len(rows) <= 1.3 * least + 8
    assert rows == covering(*axes)
