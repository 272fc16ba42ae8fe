"""One global order, whatever the number of ranks; random numbers by name; images that grow with the epochs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch

from imagenet_fast.data.order import (
    BatchIndices,
    EvalSampler,
    TrainSampler,
    augmentation_of,
    bits,
    resolution,
    uniforms,
)
from imagenet_fast.recipe.batching import Batching
from tests.conftest import refusal_of
from tests.data.small import ALONE, LOADERS, image_data, opened

IMAGES, GLOBAL = 101, 24


def steps(ranks: int, micro_batch: int, count: int) -> list[list[tuple[int, ...]]]:
    """The micro-batches of the first steps, over all ranks."""
    batching = Batching(ranks, micro_batch, GLOBAL // ranks // micro_batch)
    orders = [iter(TrainSampler(IMAGES, batching, rank, seed=3)) for rank in range(ranks)]
    return [
        sorted(tuple(m.images) for order in orders for m in islice(order, batching.accumulation)) for _ in range(count)
    ]


def test_the_same_micro_batches_make_up_a_step_on_any_number_of_ranks():
    alone = steps(1, 4, 9)
    for ranks in (2, 3, 6):
        assert steps(ranks, 4, 9) == alone


def test_an_epoch_shows_no_image_twice_and_the_next_one_is_another():
    first_two = steps(2, 4, 2 * (IMAGES // GLOBAL))
    epochs = [[i for step in half for micro in step for i in micro] for half in (first_two[:4], first_two[4:])]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == IMAGES // GLOBAL * GLOBAL
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1]), "what is left out changes from epoch to epoch"


def test_the_order_is_a_matter_of_our_own_numbers():
    """NumPy's generators may change with its version, and so would a run that goes on, or that has two of them."""
    order = TrainSampler(12, Batching(1, 12, 1), 0, seed=7)
    epochs = [batch.images.tolist() for batch in islice(order, 2)]
    assert epochs == [[7, 6, 11, 8, 9, 3, 1, 4, 2, 10, 5, 0], [4, 10, 7, 9, 1, 0, 5, 3, 11, 8, 6, 2]]


def test_an_order_that_begins_later_goes_on_as_the_whole_one():
    """From the middle of an epoch, from its end, into the next."""
    for first_step, ranks in product((0, 1, 3, 4, 9, 4_000_001), (1, 2, 3)):
        batching = Batching(ranks, 4, GLOBAL // ranks // 4)
        whole = TrainSampler(IMAGES, batching, ranks - 1, seed=3, first_step=first_step // 4 * 4)
        later = replace(whole, first_step=first_step)
        skipped = first_step % 4 * batching.accumulation
        for one, other in zip(islice(whole, skipped, skipped + 20), islice(later, 20), strict=True):
            assert one.epoch == other.epoch
            assert np.array_equal(one.images, other.images)
        assert next(iter(later)).epoch == first_step // 4


def test_an_evaluation_shows_every_image_once():
    for ranks, batch in product((1, 2, 3, 4, 7, 120), (1, 8, 200)):
        orders = [EvalSampler(IMAGES, batch, ranks, rank) for rank in range(ranks)]
        batches = [images for order in orders for _, images, _ in islice(order, order.batches)]
        assert all(0 < len(images) <= batch for images in batches)
        assert [int(i) for images in batches for i in images] == list(range(IMAGES))


def test_pipeline_ranks_read_the_same_images():
    batching = Batching(ranks=6, micro_batch=4, accumulation=2, stages=3)
    orders = [TrainSampler(16, batching, rank, seed=1) for rank in range(6)]
    read = [[tuple(micro.images) for micro in islice(order, 2)] for order in orders]
    assert read[0] == read[2] == read[4]
    assert read[1] == read[3] == read[5]
    assert sorted(sum(read[0] + read[1], ())) == list(range(16))


MANY = np.arange(40_000)


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
    assert uniforms(3, "flip", 7, 2, of=MANY[:0]).shape == (0, 3)


def numbers(*names: int, purpose: str = "flip", of: np.ndarray = MANY) -> np.ndarray:
    return uniforms(1, purpose, *names, of=of)[:, 0]


NEIGHBOURS = {
    "images": (numbers(1, 0), numbers(1, 0, of=MANY + 1)),
    "epochs": (numbers(1, 0), numbers(1, 1)),
    "seeds": (numbers(1, 5), numbers(2, 5)),
    "purposes": (numbers(1, 0), numbers(1, 0, purpose="crop")),
    "numbers of an image": tuple(uniforms(2, "flip", 1, 0, of=MANY).T),
    "a seed and an epoch": (numbers(1, 2), numbers(2, 1)),
}


def test_neighbours_are_independent():
    """Every pair of sixteenths of [0, 1) comes as often as it should: chi-squared of 255 degrees of freedom."""
    for neighbours, (one, other) in NEIGHBOURS.items():
        counts = np.histogram2d(one, other, bins=16, range=((0, 1), (0, 1)))[0]
        expected = len(MANY) / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4 * np.sqrt(2 * 255), neighbours
        assert min(one.min(), other.min()) >= 0
        assert max(one.max(), other.max()) < 1


GROWING = {"sizes": [[1, 36], [2, 40]], "eval_size": 52}


@pytest.mark.parametrize(("loader", "augment"), [("dali", True), ("dali", False), ("threads", True)])
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
    windows = chance.windows(np.array([[300, 512]] * 4), np.array(list(product((0.0, 0.999), repeat=2))))
    assert (windows[:, 2:] == round(227 / 256 * 300)).all()
    assert windows[:, :2].tolist() == [[0, 106], [0, 140], [34, 106], [34, 140]]
    assert chance.windows(np.array([[1, 1]]), np.array([[0.5, 0.5]])).tolist() == [[0, 0, 1, 1]]


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
        ({"loader": "dali", "crop": "padded"}, "crop 'padded' is for loader 'threads'; --set data.loader=threads"),
        ({"crop": "padded", "crop_padding": 56}, "(56) must be less than an image's shorter side of 56 pixels"),
        ({"crop": "padded", "crop_padding": 42, "sizes": [[1, 36]]}, "shorter side of 42 pixels"),
    ):
        assert said in refusal_of(image_data, **changes)
