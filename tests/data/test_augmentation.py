"""Windows and flips: torchvision's distributions, as functions of (seed, epoch, image)."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from imagenet_fast.data.order import Augmentation, BatchIndices

DRAWS = 2000
WHOLE = (0.08, 1.0)


def windows(height: int, width: int, area: tuple[float, float], count: int = DRAWS, **names: int) -> np.ndarray:
    """Of as many images of one size: [count, 4]."""
    augmentation = Augmentation(names.get("seed", 1), area, flip=True)
    numbers, _ = augmentation.draw(BatchIndices(names.get("epoch", 0), np.arange(count)))
    return augmentation.windows(np.tile([height, width], (count, 1)), numbers)


def torchvisions(height: int, width: int, area: tuple[float, float], count: int = DRAWS) -> np.ndarray:
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    return np.array([RandomResizedCrop.get_params(image, list(area), [3 / 4, 4 / 3]) for _ in range(count)])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Between two samples' distributions: Kolmogorov's and Smirnov's statistic."""
    values = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (one, other)]
    return np.abs(shares[0] - shares[1]).max()


@pytest.mark.parametrize(("height", "width", "area"), [(375, 500, WHOLE), (32, 32, (0.7, 1.0)), (300, 90, (0.3, 0.6))])
def test_windows_are_distributed_as_torchvisions(height: int, width: int, area: tuple[float, float]):
    """Also where most attempts do not fit, and the central window is taken often."""
    ours, theirs = windows(height, width, area), torchvisions(height, width, area)
    sides = {"area": [w[:, 2] * w[:, 3] for w in (ours, theirs)], "aspect": [w[:, 3] / w[:, 2] for w in (ours, theirs)]}
    places = {side: [w[:, column] for w in (ours, theirs)] for column, side in enumerate(("top", "left"))}
    centres = {"middle": [w[:, 0] + w[:, 2] / 2 - w[:, 1] - w[:, 3] / 2 for w in (ours, theirs)]}
    for name, (one, other) in (sides | places | centres).items():
        assert distance(one, other) < 1.95 * math.sqrt(2 / DRAWS), name  # one in a thousand exceeds it by chance


def test_where_no_attempt_fits_it_is_torchvisions_central_window():
    for size in ((10, 1000), (1000, 10), (7, 300), (1, 500), (3, 2)):
        area = (1.0, 1.0)
        if size == (3, 2):  # an attempt may fit here, but not one of so little area: no side is a pixel long
            area = (1e-6, 2e-6)
        ours, theirs = windows(*size, area, count=20), torchvisions(*size, area, count=20)
        assert np.array_equal(ours, theirs)
        assert len(np.unique(ours, axis=0)) == 1


def test_every_window_lies_within_its_image_and_some_reach_every_edge():
    sizes = [(1, 1), (1, 2), (2, 1), (5, 4), (1, 3000), (65500, 3), (4, 4)]
    for size, area in product(sizes, (WHOLE, (1.0, 1.0), (0.001, 0.002))):
        corner, extent = np.split(windows(*size, area, count=100), 2, axis=1)
        assert (corner >= 0).all()
        assert (extent > 0).all()
        assert (corner + extent <= size).all()
    corner, extent = np.split(windows(12, 12, (0.5, 0.6)), 2, axis=1)
    assert corner.min(axis=0).tolist() == [0, 0]
    assert (corner + extent).max(axis=0).tolist() == [12, 12]


def test_the_largest_of_numbers_stays_within_the_image():
    augmentation = Augmentation(1, (0.1, 0.2), flip=True)
    last, first = augmentation.windows(np.full((2, 2), 65535), np.array([[1 - 2.0**-53] * 22, [0.0] * 22]))
    assert (last[:2] + last[2:]).tolist() == [65535, 65535]
    assert first[:2].tolist() == [0, 0]


def test_half_of_all_images_are_mirrored_each_in_half_of_all_epochs_if_any():
    mirrored = Augmentation(1, WHOLE, flip=True)
    flips = np.array([mirrored.draw(BatchIndices(epoch, np.arange(DRAWS)))[1] for epoch in range(40)])
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / math.sqrt(flips.size)
    assert np.abs(flips.mean(axis=1) - 0.5).max() < 5 * 0.5 / math.sqrt(DRAWS)
    assert np.abs(flips.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(40)
    assert not Augmentation(1, WHOLE, flip=False).draw(BatchIndices(0, np.arange(DRAWS)))[1].any()


def test_alternating_flips_show_both_sides_of_an_image_in_two_epochs():
    """Flips of airbench: at random in the first epoch, and from then on the mirror of the epoch before."""
    alternate = Augmentation(1, WHOLE, flip="alternate")
    images = np.arange(DRAWS)
    first = alternate.draw(BatchIndices(0, images))[1]
    assert abs(first.mean() - 0.5) < 4 * 0.5 / math.sqrt(DRAWS)
    for epoch in range(6):
        assert np.array_equal(alternate.draw(BatchIndices(epoch, images))[1], first ^ (epoch % 2 == 1))
    some = alternate.draw(BatchIndices(3, images[40:50]))[1]
    assert np.array_equal(some, ~first[40:50]), "a function of (seed, epoch, image), whatever the batch"
    assert not np.array_equal(Augmentation(2, WHOLE, flip="alternate").draw(BatchIndices(0, images))[1], first)
    usual = Augmentation(1, WHOLE, flip=True)
    assert np.array_equal(alternate.draw(BatchIndices(0, images))[0], usual.draw(BatchIndices(0, images))[0])
