"""From the files that image-net.org gives, odd and broken ones among them, to a run trained on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.prepare.replica import good, official_tars, small_imagenet
from tests.e2e.command import events_of, imagenet_fast, outcome_of


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("loader", "how"),
    [
        ("folder", "--resize 64"),
        ("dali", ""),
        ("folder", "--format webdataset --shard-size 100KB"),
        ("dali", "--format tfrecord --shard-size 100KB --resize 64"),
    ],
)
def test_tars_are_prepared_verified_and_trained_on(tmp_path: Path, loader: str, how: str):
    images = small_imagenet(train=16, val=5)
    source = official_tars(tmp_path / "tars", images)
    data, run = tmp_path / "imagenet", tmp_path / "run"
    for command in (
        ("prepare", "--source", str(source), "--out", str(data), "--subset", *how.split()),
        ("verify", "--data", str(data)),
    ):
        done = imagenet_fast("data", *command)
        assert done.returncode == 0, done.stderr
    options = {
        "data.loader": loader, "global_batch": 16, "micro_batch": 8, "epochs": 2, "schedule.warmup_epochs": 1,
        "target_top1": 0.1, "first_eval": 2,
    }  # fmt: skip
    settings = [text for key, value in options.items() for text in ("--set", f"{key}={value}")]
    done = imagenet_fast("train", "--recipe", "demo", "--data", str(data), "--out", str(run), "--nproc", "2", *settings)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert f"; 3 files are left out, by {data / 'quarantine.json'}" in done.stdout
    trained = sum(path.startswith("train/") for path in good(images)) - 3
    assert outcome_of(run)["steps"] == 2 * (trained // 16)
    assert [event["images"] for event in events_of(run, "eval")][-1] == 20
