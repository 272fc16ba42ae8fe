"""The wait for the slowest rank, beside draws."""

from __future__ import annotations

import numpy as np
import pytest

from imagenet_fast.plan.stragglers import expected_max, straggling


def test_the_mean_of_the_largest_is_that_of_draws_and_of_two_ranks_by_the_formula():
    for ranks in (2, 8, 64, 1024):
        draws = np.random.default_rng(ranks).standard_normal((2000, ranks)).max(axis=1)
        assert expected_max(ranks) == pytest.approx(draws.mean(), abs=4 * draws.std() / np.sqrt(len(draws))), ranks
    assert expected_max(1) == pytest.approx(0, abs=1e-9)
    assert expected_max(2) == pytest.approx(1 / np.sqrt(np.pi), abs=1e-6)


def test_an_engine_that_defers_absorbs_nothing():
    """Ranks meet in each step, a forward later: the time of many steps is still the sum of the slowest's."""
    ranks, steps, sigma, forward = 64, 400, 0.01, 0.35
    factors = 1 + sigma * np.random.default_rng(1).standard_normal((steps, ranks))
    ready = np.zeros(ranks)  # when each rank's backward has ended
    for factor in factors:
        arrived = ready.max()  # the mean needs every rank's gradients
        read = np.maximum(ready, arrived)  # the next forward's first layer is read now
        ready = read + factor * (forward + (1 - forward))
    assert ready.max() / steps == pytest.approx(straggling(sigma, ranks), rel=2e-3)
