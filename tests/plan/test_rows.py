"""Published and measured rows beside the model: the errors that docs/plan.md states."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from imagenet_fast.metrics.tables import table
from imagenet_fast.plan.rows import LARGE_MISS, Compared, all_rows
from tests.plan.test_prediction import by_engine

pytestmark = pytest.mark.ci

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def errors(**wanted: str) -> list[float]:
    return [abs(row.error) for row in all_rows() if all(getattr(row, key) == value for key, value in wanted.items())]


def test_measured_steps_follow_from_the_nominal_link():
    measured = errors(calibrated_on="nothing")
    assert len(measured) == 60
    assert fmean(measured) < 0.02
    assert max(measured) < 0.065


def test_the_engine_that_is_predicted_as_fastest_is_near_the_fastest_that_was_measured():
    networks: dict[str, list[Compared]] = {}
    for row in all_rows():
        if row.calibrated_on == "nothing" and row.engine.split()[0] in ("ring", "lazy", "hybrid", "dear"):
            networks.setdefault(row.name, []).append(row)
    for name, rows in networks.items():
        taken = min(rows, key=lambda row: row.predicted)
        assert taken.reported <= 1.025 * min(row.reported for row in rows), name


def test_large_systems_are_held_out_and_those_that_calibrate_are_small():
    large = [row for row in all_rows() if row.name.startswith("MLPerf") and row.gpus >= 512]
    assert len(large) == 16
    assert {row.calibrated_on for row in large} == {"held out"}
    assert fmean(abs(row.error) for row in large if not row.name.startswith("MLPerf v0.5")) < 0.09
    assert fmean(abs(row.error) for row in large) < 0.13, "v0.5 is older than trees and fused messages"
    fitted = [row for row in all_rows() if row.calibrated_on == "itself"]
    assert all(row.gpus <= 64 and abs(row.error) < 0.01 for row in fitted)


def test_a_row_that_is_missed_says_what_is_left():
    for row in all_rows():
        if row.calibrated_on != "nothing":
            assert bool(row.left) == (abs(row.error) > LARGE_MISS), row.name


def test_ours_overlap_and_are_never_slower_than_one_message_after_backward():
    assert all(row.ours_s <= row.predicted for row in all_rows() if row.engine == "allreduce fused bf16")


def test_a_measured_row_shows_no_engine_of_ours_beside_it():
    measured = [row for row in all_rows() if row.calibrated_on == "nothing"]
    assert {"ours", "ours ms"}.isdisjoint(column.header for column in table(measured).columns)


def test_the_page_has_the_rows():
    for row in all_rows():
        if row.calibrated_on != "nothing":
            reported, predicted, ours = (f"{1e3 * s:.2f}" for s in (row.reported, row.predicted, row.ours_s))
            figures = f"{row.batch} | {reported} | {predicted} | {row.error:+.1%} | {row.calibrated_on}"
            assert f"| {row.name} | {row.gpus} | {figures} | {row.ours.split()[0]} {ours} |" in PAGE
    assert f"mean error {100 * fmean(errors(calibrated_on='nothing')):.1f} %, worst" in PAGE


def test_the_page_has_alexnet_on_512_gpus():
    rows = by_engine(512)
    for name, engine in (("`dear`", "dear bf16"), ("`lazy`, int8", "lazy int8"), ("`sparse`", "sparse bf16")):
        row = rows[engine]
        band = f"{100 * row.efficiency_low:.0f}-{100 * row.efficiency_high:.0f}"
        figures = f"{1e3 * row.step_s:.2f} | {1e3 * row.exposed_s:.2f} | {row.nic_bytes / 1e6:.1f}"
        assert f"| {name} | {figures} | {100 * row.efficiency:.1f} % ({band}) |" in PAGE


def test_the_page_has_efficiency_over_bandwidth():
    for gbit in (10, 25, 56, 100, 400):
        rows = by_engine(512, float(gbit), "lazy,hybrid,dear,sparse")
        shares = (100 * rows[f"{engine} bf16"].efficiency for engine in ("lazy", "hybrid", "dear", "sparse"))
        assert f"| {gbit} | {' | '.join(f'{share:.0f}' for share in shares)} |" in PAGE
