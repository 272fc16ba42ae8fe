"""A replayed model keeps its pace."""

from __future__ import annotations

import pytest

from imagenet_fast.bench import replay
from imagenet_fast.bench.replay import Pace


class Clock:
    """By which every sleep lasts ``late`` seconds longer."""

    def __init__(self, late: float) -> None:
        self.now, self._late = 5.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self._late


@pytest.mark.parametrize(("late", "lasts"), [(0.0, 10.0), (0.25, 10.25), (1.75, 10.75)])
def test_a_layer_that_was_woken_late_makes_up_for_it_in_the_next_ones(
    late: float, lasts: float, monkeypatch: pytest.MonkeyPatch
):
    clock, pace = Clock(late), Pace()
    monkeypatch.setattr(replay, "time", clock)
    for _ in range(10):
        pace.nap(1.0)
    assert clock.now - 5.0 == pytest.approx(lasts)


def test_what_is_done_between_two_naps_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch):
    clock, pace = Clock(0.0), Pace()
    monkeypatch.setattr(replay, "time", clock)
    pace.nap(1.0)
    clock.now += 0.5
    pace.nap(1.0)
    assert clock.now - 5.0 == pytest.approx(2.5)
