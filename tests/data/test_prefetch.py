"""Threads that fill batches: in order, ahead but not too far; an epoch leaves nothing behind, neither does a loader."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import psutil
import pytest

from imagenet_fast.data.loader import Job, prefetched
from imagenet_fast.recipe.batching import Batching
from tests.conftest import make_images
from tests.data.small import LOADERS, opened
from tests.e2e.command import wait_for
from tests.ranks import run


def fill(batch: list[int], place: int, value: int) -> Job:
    time.sleep(0.001 * (value % 3))
    batch[place] = value
    yield


def numbers(begun: list[int], size: int = 4) -> Iterator[tuple[list[int], list[Job]]]:
    for number in count():
        begun.append(number)
        batch = [-1] * size
        yield batch, [fill(batch, place, number * size + place) for place in range(size)]


@pytest.fixture
def threads() -> Callable[[], int]:
    """How many have been started by this test, and not ended."""
    before = set(threading.enumerate())
    return lambda: len(set(threading.enumerate()) - before)


@pytest.mark.parametrize(("workers", "depth"), [(1, 1), (3, 2), (5, 1), (2, 7)])
def test_batches_come_whole_and_in_order_and_few_are_ahead(workers: int, depth: int):
    begun: list[int] = []
    for number, batch in enumerate(islice(prefetched(numbers(begun), workers, depth), 20)):
        assert batch == list(range(4 * number, 4 * number + 4))
        assert begun == list(range(number + depth + 1))


def test_an_error_comes_in_the_turn_of_its_batch(threads: Callable[[], int]):
    def broken() -> Job:
        raise OSError("the disk is gone")
        yield

    batches = islice(numbers([]), 2)
    ahead = prefetched([*batches, ([], [broken()])], 2, 4)
    assert len(list(islice(ahead, 2))) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    wait_for(lambda: not threads())


def test_threads_end_when_iterator_is_dropped(threads: Callable[[], int]):
    steps: list[int] = []

    def long() -> Job:
        for step in range(100_000):
            steps.append(step)
            time.sleep(0.001)
            yield

    ahead = prefetched([([0], []), ([1], [long()]), ([2], [long()])], 1, 1)
    assert next(ahead) == [0]
    assert threads() == 1
    del ahead
    wait_for(lambda: not threads())
    assert len(steps) < 50_000


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_that_is_dropped_leaves_no_thread_that_reads(image_dir: Path, loader: str, threads: Callable[[], int]):
    dataset = opened(image_dir, loader)
    next(dataset.train)
    list(dataset.next_evaluation())
    assert threads() >= 2
    del dataset
    wait_for(lambda: not threads())


EPOCHS = 20
SETTLED = 5
"""Epochs after which buffers, pools and arenas have the size that they keep."""

TRAIN, BATCH = 240, 24
SLACK = 10e6
"""Bytes. Images that stayed, decoded, would come to ten times as much."""


def resident(root: str, loader: str) -> list[int]:
    """Bytes after each of many epochs, each with its evaluation."""
    dataset = opened(Path(root), loader, Batching(1, BATCH, 1), image_size=64, resize=72, workers=0)
    after = []
    for _ in range(EPOCHS):
        deque(islice(dataset.train, TRAIN // BATCH), maxlen=0)
        deque(dataset.next_evaluation(), maxlen=0)
        gc.collect()
        after.append(psutil.Process().memory_info().rss)
    return after


@pytest.mark.weekly
@pytest.mark.parametrize("loader", ["threads", "dali"])
def test_memory_is_flat_over_twenty_epochs(tmp_path: Path, loader: str):
    make_images(tmp_path, train=TRAIN, val=30)
    (after,) = run(1, resident, str(tmp_path), loader, fresh=True)
    assert max(after[SETTLED:]) - max(after[:SETTLED]) < SLACK, [round(size / 1e6, 1) for size in after]
