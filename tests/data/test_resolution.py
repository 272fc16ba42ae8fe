"""Images that grow with the epochs, and are judged at another size."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from imagenet_fast.data.augmentation import augmentation_of
from imagenet_fast.data.sampler import BatchIndices, EvalSampler, TrainSampler, resolution
from tests.conftest import refusal_of
from tests.data.small import ALONE, LOADERS, image_data, opened

GROWING = {"sizes": [[1, 36], [2, 40]], "eval_size": 52}


@pytest.mark.parametrize(("loader", "augment"), [("dali", True), ("dali", False), ("folder", True)])
def test_progressive_sizes_and_eval_size(image_dir: Path, loader: str, augment: bool):
    dataset = opened(image_dir, loader, augment=augment, **GROWING)
    each = dataset.train_order.steps_per_epoch
    sizes = [images.shape[2:] for images, _ in islice(dataset.train, 3 * each)]
    assert sizes == [(36, 36)] * each + [(40, 40)] * 2 * each
    assert [images.shape[2:] for images, _ in dataset.next_evaluation()] == [(52, 52)]
    images, _ = next(opened(image_dir, loader, first_step=each, augment=augment, **GROWING).train)
    assert images.shape[2:] == (40, 40)
    assert images.is_contiguous(memory_format=torch.channels_last)
    within = opened(image_dir, loader, augment=augment, sizes=[[1, 36], [2, 48]], size_multiple=4)
    assert [images.shape[2] for images, _ in islice(within.train, 6)] == [36, 40, 40, 44, 44, 48]


def test_before_the_first_size_images_have_the_usual_one():
    data, train = image_data(sizes=[[3, 64]]), TrainSampler(40, ALONE, 0, 1)
    assert [resolution(data, train, at(epoch)).size for epoch in range(4)] == [48, 48, 64, 64]
    assert resolution(data, EvalSampler(7, 8, 1, 0), at(5)) == (48, 56)
    assert resolution(data, train, at(0)).shorter == 56
    assert resolution(data, train, at(3)).shorter == 74  # the same share of the image


def at(epoch: int, done: float = 0.0) -> BatchIndices:
    return BatchIndices(epoch, np.arange(1), done)


def test_sizes_a_step_are_composers():
    """ProgressiveResizing(initial_scale=.5, delay_fraction=.4, finetune_fraction=.2, size_increment=4), written out."""
    epochs, side, steps = 27, 176, 25  # no step is exactly between two sizes
    knots = [[1, 88], [1 + 0.4 * epochs, 88], [1 + 0.8 * epochs, side]]
    data = image_data(image_size=side, resize=232, sizes=knots, size_multiple=4)
    train = TrainSampler(8 * steps, ALONE, 0, 1)
    batches = list(islice(train, epochs * steps))
    expected = []
    for step in range(epochs * steps):
        elapsed = step / (epochs * steps)
        ramp = min(1.0, max(0.0, (elapsed - 0.4) / (1 - 0.2 - 0.4)))
        expected.append(round(side * (0.5 + 0.5 * ramp) / 4) * 4)
    sizes = [resolution(data, train, batch).size for batch in batches]
    assert sizes == expected
    assert len(set(sizes)) == 23
    resumed = TrainSampler(8 * steps, ALONE, 0, 1, first_step=500)
    assert [resolution(data, resumed, b).size for b in islice(resumed, 100)] == sizes[500:600]


def test_every_size_on_the_way_is_known_before():
    data = image_data(image_size=100, resize=232, sizes=[[2, 128], [6, 192]], size_multiple=32)
    assert data.training_sizes == {100, 128, 160, 192}


def test_alexnets_own_windows_are_squares_from_the_middle_square():
    chance = augmentation_of(image_data(crop="window", image_size=227, resize=256), TrainSampler(40, ALONE, 0, 1))
    assert chance is not None
    corners = [chance.window(300, 512, [down, right]) for down in (0.0, 0.999) for right in (0.0, 0.999)]
    side = round(227 / 256 * 300)
    assert {(w.height, w.width) for w in corners} == {(side, side)}
    assert [(w.top, w.left) for w in corners] == [(0, 106), (0, 140), (34, 106), (34, 140)]
    assert chance.window(1, 1, [0.5, 0.5]) == (0, 0, 1, 1)


@pytest.mark.parametrize("loader", LOADERS)
def test_mixed_images_come_with_shares_of_their_classes(image_dir: Path, loader: str):
    dataset = opened(image_dir, loader, mixup=0.4, cutmix=1.0)
    for images, labels in islice(dataset.train, 6):
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.shape == (8, dataset.classes)
        torch.testing.assert_close(labels.sum(1), torch.ones(8))
    assert all(labels.dtype == torch.int64 for _, labels in dataset.next_evaluation())


def test_what_makes_no_sense_is_refused():
    for changes, said in (
        ({"sizes": [[2, 40], [1, 48]]}, "rising epochs, such as [[1, 128], [6, 192]], not [2, 1]"),
        ({"sizes": [[1, 40], [1, 48]]}, "rising epochs"),
        ({"sizes": [[1, 16]]}, "data.sizes from epoch 1 on (16) is too small for resnet18"),
        ({"sizes": [[0, 40]]}, "sizes"),
        ({"sizes": [40]}, "sizes"),
        ({"sizes": [[1, 40], [2, 46]], "size_multiple": 4}, "multiples of size_multiple (4), and 46 is not"),
        ({"eval_size": 57}, "resize (56) must be at least eval_size (57)"),
        ({"eval_size": 31}, "eval_size (31) is too small"),
        ({"mixup": -1}, "mixup"),
        ({"crop": "krizhevsky"}, "crop"),
    ):
        assert said in refusal_of(image_data, **changes)
