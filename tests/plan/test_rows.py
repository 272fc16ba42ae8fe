"""Published and measured rows beside the model: the errors that docs/plan.md states."""

from __future__ import annotations

from statistics import fmean

from imagenet_fast.plan.rows import LARGE_MISS, all_rows

ROWS = all_rows()


def errors(**wanted: str) -> list[float]:
    return [abs(row.error) for row in ROWS if all(getattr(row, key) == value for key, value in wanted.items())]


def test_measured_steps_follow_from_the_nominal_link():
    measured = errors(calibrated_on="nothing")
    assert len(measured) == 60
    assert fmean(measured) < 0.02
    assert max(measured) < 0.05


def test_rows_that_calibrate_are_small_systems():
    fitted = [row for row in ROWS if row.calibrated_on == "itself"]
    assert all(row.gpus <= 64 for row in fitted)
    assert max(abs(row.error) for row in fitted) < 0.01


def test_large_systems_are_held_out():
    large = [row for row in ROWS if row.name.startswith("MLPerf") and row.gpus >= 512]
    assert len(large) == 16
    assert {row.calibrated_on for row in large} == {"held out"}
    assert fmean(abs(row.error) for row in large if not row.name.startswith("MLPerf v0.5")) < 0.09
    assert fmean(abs(row.error) for row in large) < 0.13, "v0.5 is older than trees and fused messages"


def test_a_row_that_is_missed_says_what_is_left():
    for row in ROWS:
        if row.calibrated_on != "nothing":
            assert bool(row.left) == (abs(row.error) > LARGE_MISS), row.name


def test_ours_overlap_and_are_never_slower_than_one_message_after_backward():
    assert all(row.ours_s <= row.predicted for row in ROWS if row.engine == "allreduce fused bf16")
