"""One command trains a recipe with several engines, each on hosts of its own, and says who was first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import imagenet_fast


def test_engines_are_compared_over_a_network_of_ones_own(root: None, tmp_path: Path):
    out = tmp_path / "runs"
    done = imagenet_fast(
        "compare", "--recipe", "smoke", "--sync", "lazy,sparse", "--hosts", "2", "--rate", "1gbit", "--out", str(out),
        "--set", "data.train_images=64", "--set", "epochs=1", "--set", "sparse.dense_epochs=0",
        "--set", "sparse.ramp_epochs=0", "--set", "sparse.sparsity=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {name: json.loads((out / name / "outcome.json").read_text()) for name in ("lazy", "sparse")}
    assert all(outcome["status"] == "finished" and outcome["steps"] == 2 for outcome in outcomes.values())
    assert 0.4 < outcomes["sparse"]["sent_bytes_per_step"] / outcomes["lazy"]["sent_bytes_per_step"] < 0.6
    assert (out / "compare.png").stat().st_size > 10_000
    assert all(list((out / name / "tb").iterdir()) for name in outcomes)
    table = done.stdout[done.stdout.index("run ") :]
    assert "lazy" in table
    assert "sparse" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sync", "lazy,rng"), "sync.kind is 'rng'"),
        (("--sync", "lazy", "--rate", "fast"), "such as 250mbit"),
        (("--sync", "lazy", "--seeds", "one"), "not a list of whole numbers"),
        (("--sync", "lazy", "--set", "sync.colective=ring"), "unknown key sync.colective"),
        (("--sync", "lazy", "--set", "ring.bucket_mb=1"), "is for ring, which is not in --sync lazy"),
        (("--sync", "lazy,ring,lazy"), "lazy would be run twice"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    refusal: Callable[..., str],
):
    runs = tmp_path / "runs"
    assert sentence in refusal("compare", "--recipe", "smoke", "--out", str(runs), *arguments)
    assert not runs.exists()
