"""From the files that image-net.org gives, odd and broken ones among them, to a run trained on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.prepare.replica import good, official_tars, small_imagenet
from tests.e2e.command import Forked, events_of, outcome_of, setting


@pytest.mark.parametrize(
    ("loader", "how"),
    [
        pytest.param("threads", "--resize 64", marks=pytest.mark.ci),
        pytest.param("dali", "", marks=pytest.mark.weekly),
        pytest.param("threads", "--format webdataset --shard-size 100KB", marks=pytest.mark.weekly),
        pytest.param("dali", "--format webdataset --shard-size 100KB --resize 64", marks=pytest.mark.weekly),
    ],
)
def test_tars_are_prepared_verified_and_trained_on(tmp_path: Path, loader: str, how: str):
    images = small_imagenet(train=16, val=5)
    source = official_tars(tmp_path / "tars", images)
    data, run = tmp_path / "imagenet", tmp_path / "run"
    prepare = ("prepare", "--source", str(source), "--out", str(data), "--subset", *how.split())
    for command in (prepare, ("verify", "--data", str(data))):
        code, _, said = Forked(tmp_path, "data", *command).ended()
        assert code == 0, said
    changes = setting(
        f"data.loader={loader}", "global_batch=16", "micro_batch=8", "epochs=2", "schedule.warmup_epochs=1",
        "target_top1=0.1", "first_eval=2", "precision.kind=fp32",
    )  # fmt: skip
    demo = ("train", "--recipe", "demo", "--data", str(data), "--out", str(run), "--nproc", "2")
    code, printed, said = Forked(tmp_path, *demo, *changes).ended()
    assert code in (0, 3), printed + said
    assert f"; 3 files are left out, by {data / 'quarantine.json'}" in printed
    trained = sum(path.startswith("train/") for path in good(images)) - 3
    assert outcome_of(run)["steps"] == 2 * (trained // 16)
    assert [event["images"] for event in events_of(run, "eval")][-1] == 20
