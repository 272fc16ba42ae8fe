"""The papers' own tables: each technique's gain, and what hiding communication gains at each batch size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.bench.presets import bench_batches
from imagenet_fast.bench.tables import batch_table
from tests.bench.small import SMALL, benched


@pytest.mark.ci
def test_every_step_of_the_ladder_is_what_it_says_beside_the_one_it_is_added_to(tmp_path: Path):
    rungs, printed = benched(tmp_path, "sync --ladder --model small.json --hosts 2 --rounds 1 --steps 1")
    times = [rung["time"] for rung in rungs]
    seconds = [time["step_s"] for time in times]
    assert rungs[0]["gain"] is None
    for rung, below in zip(range(1, 8), (0, 1, 2, 3, 4, 4, 6), strict=True):
        assert rungs[rung]["gain"] == pytest.approx(seconds[below] / seconds[rung])
    assert [rung["in_all"] for rung in rungs] == pytest.approx([seconds[0] / s for s in seconds])
    assert all(rung["step"] in printed for rung in rungs)
    tensors = sum(len(layer.shapes) for layer in SMALL.layers)
    assert [time["wire"] for time in times] == ["fp32", "fp32", *["bf16"] * 5, "int8"]
    assert min(time["launches"] for time in times[:4]) >= tensors  # long ones go in pieces
    assert times[4]["launches"] < times[3]["launches"] == times[2]["launches"]
    assert times[2]["sent_bytes"] == pytest.approx(times[1]["sent_bytes"] / 2, rel=0.01)
    assert times[5]["sent_bytes"] < times[4]["sent_bytes"]
    assert times[7]["sent_bytes"] == pytest.approx(times[6]["sent_bytes"] / 2, rel=0.05)
    assert all(time["predicted_s"] >= SMALL.compute_s for time in times)
    assert times[0]["limit_s"] > times[3]["limit_s"] >= times[6]["limit_s"]


@pytest.mark.weekly
def test_a_smaller_batch_computes_less_and_sends_as_much():
    measure = partial(bench_sync, hosts=2, ranks_per_host=1, rate=None, scale=1, rounds=1, steps=1)
    small, large = rows = bench_batches(SMALL, [16, 64], measure)
    assert (small.batch, large.batch) == (16, 64)
    assert SMALL.compute_s / 4 <= small.ddp.compute_s < SMALL.compute_s <= large.ddp.compute_s
    for row in rows:
        assert (row.ddp.engine, row.hybrid.engine) == ("ddp", "hybrid")
        assert row.ddp.compute_s == row.hybrid.compute_s
        assert row.gain == pytest.approx(1 - row.hybrid.step_s / row.ddp.step_s)
        assert row.hybrid.limit_s >= row.hybrid.compute_s
    assert str(batch_table(rows).title) == "small, 2 hosts, loopback, bf16"
