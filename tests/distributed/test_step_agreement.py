"""All ranks do after the same step what one of them wishes, however far their hosts are apart."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest

import tests
from imagenet_fast.distributed import step_agreement
from imagenet_fast.distributed.messages import from_main, to_main
from imagenet_fast.distributed.step_agreement import StepAgreement
from tests.ranks import with_ranks


@pytest.mark.parametrize("step_s", [0.001, 0.1])
@with_ranks(3)
@patch.multiple(step_agreement, _LOOK_S=0.05, _AHEAD_S=0.1)
def test_ranks_that_run_ahead_of_one_another_stop_after_the_same_step(step_s: float):
    """After a save that rank 0 wished at the same time."""
    world, done, step = tests.world(), list[tuple[int, str]](), 0
    wished = {0: "save", 1: "stop", 2: "stop"}[world.rank]
    agreed = StepAgreement(world, 0, lambda: {wished} - {wish for _, wish in done} if step * step_s > 0.1 else set())
    while len(done) < 2:
        time.sleep(step_s * (1 + world.rank))
        step += 1
        done += [(step, wish) for wish in sorted(agreed.due(step))]
    assert same_on_all_ranks(done)
    assert {wish for _, wish in done} == {"save", "stop"}
    agreed.close()


@with_ranks(2)
@patch.multiple(step_agreement, _LOOK_S=0.05)
def test_a_long_step_is_the_last_one():
    world, step = tests.world(), 7
    agreed = StepAgreement(world, 7, lambda: {"stop"} if world.rank == 1 and step == 8 else set())
    while "stop" not in agreed.due(step):
        step += 1
        time.sleep(0.7)
        assert step < 9 or agreed.hears("stop")
    assert step == 8
    agreed.close()


def test_one_rank_alone_does_at_once_what_it_wishes():
    wishes = set[str]()
    agreed = StepAgreement(tests.world(0, 1), 0, lambda: wishes)
    assert not agreed.due(1)
    wishes.add("stop")
    assert agreed.hears("stop")
    assert agreed.due(1) == {"stop"}
    agreed.close()


def same_on_all_ranks(value: object) -> bool:
    return from_main(len({repr(one) for one in to_main(repr(value))}) == 1)
