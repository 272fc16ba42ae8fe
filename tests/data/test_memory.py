"""Loaders run for weeks: an epoch leaves nothing behind."""

from __future__ import annotations

import gc
from collections import deque
from itertools import islice
from pathlib import Path

import psutil
import pytest

from imagenet_fast.recipe.batching import Batching
from tests.conftest import make_images
from tests.data.small import opened
from tests.ranks import run

EPOCHS = 20
SETTLED = 5
"""Epochs after which buffers, pools and arenas have the size that they keep."""

TRAIN, BATCH = 240, 24
SLACK = 10e6
"""Bytes. Images that stayed, decoded, would come to ten times as much."""


def resident(root: str, loader: str, cache: str) -> list[int]:
    """Bytes after each of many epochs, each with its evaluation."""
    dataset = opened(Path(root), loader, Batching(1, BATCH, 1), image_size=64, resize=72, workers=0, cache=cache)
    after = []
    for _ in range(EPOCHS):
        deque(islice(dataset.train, TRAIN // BATCH), maxlen=0)
        deque(dataset.next_evaluation(), maxlen=0)
        gc.collect()
        after.append(psutil.Process().memory_info().rss)
    return after


@pytest.mark.weekly
@pytest.mark.parametrize(("loader", "cached"), [("folder", False), ("folder", True), ("dali", False)])
def test_memory_is_flat_over_twenty_epochs(tmp_path: Path, loader: str, cached: bool):
    make_images(tmp_path, train=TRAIN, val=30)
    (after,) = run(1, resident, str(tmp_path), loader, str(tmp_path / "cache") if cached else "")
    assert max(after[SETTLED:]) - max(after[:SETTLED]) < SLACK, [round(size / 1e6, 1) for size in after]
