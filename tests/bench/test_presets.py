"""The papers' own tables: each technique's gain, and what hiding communication gains at each batch size."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.bench.presets import bench_batches
from imagenet_fast.bench.tables import batch_table
from imagenet_fast.cost_model.layer_profile import save_profile
from tests.bench.small import SMALL
from tests.e2e.command import in_process


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], str, Path]:
    folder = tmp_path_factory.mktemp("ladder")
    save_profile(SMALL, folder / "small.json")
    printed = in_process(
        "bench", "sync", "--ladder", "--model", str(folder / "small.json"), "--hosts", "2", "--rounds", "1",
        "--steps", "1", "--json", str(folder / "rows.json"), "--png", str(folder / "ladder.png"),
    )  # fmt: skip
    return json.loads((folder / "rows.json").read_text()), printed, folder / "ladder.png"


def test_every_step_is_told_beside_the_one_it_is_added_to(ladder: tuple[list[dict], str, Path]):
    rungs, printed, image = ladder
    seconds = [rung["time"]["step_s"] for rung in rungs]
    assert rungs[0]["gain"] is None
    for rung, below in zip(range(1, 8), (0, 1, 2, 3, 4, 4, 6), strict=True):
        assert rungs[rung]["gain"] == pytest.approx(seconds[below] / seconds[rung])
    assert [rung["in_all"] for rung in rungs] == pytest.approx([seconds[0] / s for s in seconds])
    assert all(rung["step"] in printed for rung in rungs)
    assert all(len(line) <= 80 for line in printed.splitlines()), printed
    assert image.stat().st_size > 10_000


def test_each_step_is_what_it_says(ladder: tuple[list[dict], str, Path]):
    rungs = [rung["time"] for rung in ladder[0]]
    tensors = sum(len(layer.shapes) for layer in SMALL.layers)
    assert [rung["wire"] for rung in rungs] == ["fp32", "fp32", *["bf16"] * 5, "int8"]
    assert min(rung["launches"] for rung in rungs[:4]) >= tensors  # long ones go in pieces
    assert rungs[4]["launches"] < rungs[3]["launches"] == rungs[2]["launches"]
    assert rungs[2]["sent_bytes"] == pytest.approx(rungs[1]["sent_bytes"] / 2, rel=0.01)
    assert rungs[5]["sent_bytes"] < rungs[4]["sent_bytes"]
    assert rungs[7]["sent_bytes"] == pytest.approx(rungs[6]["sent_bytes"] / 2, rel=0.05)
    assert all(rung["predicted_s"] >= SMALL.compute_s for rung in rungs)
    assert rungs[0]["limit_s"] > rungs[3]["limit_s"] >= rungs[6]["limit_s"]


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ladder", "--sync", "lazy"), "--sync does not go with --ladder"),
        (("--batches", "16", "--set", "lazy.threshold_mb=1"), "--set does not go with --batches"),
        (("--ladder", "--batches", "16"), "--batches does not go with --ladder"),
        (("--ladder", "--count"), "--ladder measures a network, and --count does without one"),
        (("--batches", "16,0"), "--batches 16,0 is not a list of whole numbers above 0"),
        (("--batches", ""), "is not a list of whole numbers"),
        (("--batches", "16,²"), "is not a list of whole numbers"),
    ],
)
def test_what_does_not_go_together_is_refused(refusal: Callable[..., str], options: tuple[str, ...], said: str):
    assert said in refusal("bench", "sync", *options)
