"""One global order, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest

from imagenet_fast.data.sampler import EvalSampler, TrainSampler
from imagenet_fast.recipe.batching import Batching

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


def test_another_seed_is_another_order():
    batching = Batching(1, 8, 1)
    orders = [next(iter(TrainSampler(IMAGES, batching, 0, seed))).images for seed in (1, 2)]
    assert not np.array_equal(*orders)


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


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 1), (6, 2)])
def test_epoch_across_world_sizes_shows_every_image_once(before: int, after: int):
    seen: list[int] = []
    for ranks, begin, end in ((before, 4, 6), (after, 6, 8)):
        batching = Batching(ranks, 2, GLOBAL // ranks // 2)
        for rank in range(ranks):
            order = TrainSampler(IMAGES, batching, rank, 3, begin)
            batches = list(islice(order, (end - begin) * batching.accumulation))
            assert {batch.epoch for batch in batches} == {1}
            seen += [int(i) for batch in batches for i in batch.images]
    assert len(seen) == len(set(seen)) == IMAGES // GLOBAL * GLOBAL
    undisturbed = islice(TrainSampler(IMAGES, Batching(1, GLOBAL, 1), 0, 3, 4), 4)
    assert sorted(seen) == sorted(int(i) for batch in undisturbed for i in batch.images)


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
