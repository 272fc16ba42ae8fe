"""The garbage collector has little to search once training has begun."""

import gc

import pytest
import torch  # noqa: F401  (most of what lives in a rank)

from imagenet_fast.distributed.forkserver import freeze_gc


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thaw():
    gc.unfreeze()  # newer pytest may have frozen what it imported
    yield
    gc.unfreeze()


def test_what_lives_is_not_searched_again_and_later_garbage_still_is():
    cycles = [_Cycle() for _ in range(3)]
    assert len(gc.get_objects()) > 50_000

    freeze_gc()
    assert len(gc.get_objects()) < 1_000
    assert len(cycles) == 3

    _Cycle()
    assert gc.collect() >= 1
