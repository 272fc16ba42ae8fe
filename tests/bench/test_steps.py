"""Steps and pipelines measured small: the figures are there, and say what they are of."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from imagenet_fast.bench.layer_profiler import of_batches
from imagenet_fast.bench.train_step import bench_step, step_recipe
from imagenet_fast.data.throughput import make_photos
from imagenet_fast.metrics.tables import table
from tests.bench.small import SMALL, benched
from tests.conftest import refuses


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_is_timed_beside_the_plain_loop(precision: str):
    variants = [step_recipe("resnet18", 32, 2, precision, False, sync) for sync in ("lazy", "allreduce")]
    rows = bench_step(variants, rounds=1, steps=1)
    assert [row.loop for row in rows] == ["plain PyTorch", "ours, lazy", "ours, allreduce"]
    assert rows[0].ratio_to_plain == 1
    assert all(row.step_s > 0 and row.warmup_s > 0 for row in rows)
    assert all(row.host_s is None for row in rows), "without a GPU the host does not run ahead"
    assert [str(column.header) for column in table(rows).columns] == [
        "loop", "ms/step", "fastest ms", "slowest ms", "img/s", "vs plain", "warm-up s",
    ]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("loader", ["threads", "pixels"])
def test_a_step_is_timed_beside_a_loader(loader: str, tmp_path: Path):
    make_photos(tmp_path, 4, side=64)
    rows = bench_step([step_recipe("resnet18", 32, 2, "fp32")], 1, 1, loader=loader, data=tmp_path, workers=1)  # type: ignore[arg-type]
    names = ["plain PyTorch", "ours, lazy", f"ours, lazy, from {loader}", f"{loader} alone"]
    assert [row.loop for row in rows] == names
    _, own, fed, alone = rows
    assert fed.ratio_to_synthetic == pytest.approx(fed.step_s / own.step_s)
    assert fed.ratio_to_loader == pytest.approx(fed.step_s / alone.step_s)
    assert all(row.ratio_to_synthetic is row.ratio_to_loader is None for row in rows if row is not fed)


@pytest.mark.ci
def test_a_pipeline_of_two_stages(tmp_path: Path):
    rows, printed = benched(
        tmp_path,
        "pipeline --stages 2 --micro-batches 1,4 --model resnet18 --image-size 32 --batch 8 --precision fp32 "
        "--sleep 0.002 --rounds 2 --device cpu",
    )
    assert "resnet18, 2 ranks in a pipeline" in printed
    assert [(row["schedule"], row["micro_batches"], row["expected_bubble"]) for row in rows] == [
        ("gpipe", 1, pytest.approx(1 / 2)), ("gpipe", 4, pytest.approx(1 / 5)), ("1f1b", 4, pytest.approx(1 / 5)),
        ("interleaved", 1, pytest.approx(1 / 3)), ("interleaved", 4, pytest.approx(1 / 9)),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["bubble"] < 1
        assert row["step_s"] > row["micro_batches"] * 3 * 0.002
        assert row["images_per_s"] > 0
        passes = [(busy["stage"], busy["which"]) for busy in row["timeline"]]
        for stage in range(4 if row["schedule"] == "interleaved" else 2):
            assert passes.count((stage, "forward")) == passes.count((stage, "backward")) == row["micro_batches"]
        for rank in range(2):
            own = [busy for busy in row["timeline"] if busy["stage"] % 2 == rank]
            assert all(a["begin_s"] <= a["end_s"] <= b["begin_s"] for a, b in pairwise(own)), "one at a time"
        if row["micro_batches"] == 4 and row["schedule"] != "interleaved":
            held = accumulate(1 if which == "forward" else -1 for stage, which in passes if stage == 0)
            assert max(held) == {"gpipe": 4, "1f1b": 2}[row["schedule"]], "micro-batches kept for backward"


def test_the_share_of_a_step_that_does_not_grow_is_where_a_line_through_its_batches_begins():
    for seconds, share in (
        ({128: 0.5, 32: 0.2}, 0.2), ({32: 0.2, 64: 0.3, 128: 0.5}, 0.2), ({128: 0.5}, 0.0),
        ({32: 0.1, 128: 0.5}, 0.0),
    ):  # fmt: skip
        profile = of_batches({batch: SMALL.scaled_to(step_s) for batch, step_s in seconds.items()})
        assert profile.compute_s == pytest.approx(0.5)
        assert profile.fixed == pytest.approx(share)
    refuses("--batch 128 takes no longer than fewer", of_batches, {32: SMALL.scaled_to(0.6), 128: SMALL.scaled_to(0.5)})
