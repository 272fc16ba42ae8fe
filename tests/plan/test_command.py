"""`imagenet-fast plan` as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.plan.cluster import cluster_folder
from tests.e2e.command import imagenet_fast

ASKED = {
    "engine", "wire", "gpus", "step_s", "compute_s", "exposed_s", "nic_bytes", "images_per_s", "efficiency",
    "efficiency_low", "efficiency_high", "train_s", "chosen",
}  # fmt: skip


def printed(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plan_has_a_table_a_verdict_a_dry_run_and_the_kind_of_each_input():
    text = printed("--recipe", "alexnet-512gpu")
    for part in (
        "dear bf16 *", "auto would take dear bf16\n", "with 18.0 ms a step (assumed: by FLOPs",
        "512 ranks, micro-batch 128", "memory a GPU", "images/s a node", "is assumed to be reached", "(published)",
        "(assumed)", "circular", "input.images_per_s of the cluster is unknown",
    ):  # fmt: skip
        assert part in text, part


def test_rows_and_picture_of_a_sweep(tmp_path: Path):
    file, png = tmp_path / "rows.json", tmp_path / "plan.png"
    sweep = ("--recipe", "resnet50-512gpu", "--sync", "lazy,sparse", "--json", str(file), "--png", str(png))
    printed(*sweep, "--sweep", "gpus=8..64")
    rows = json.loads(file.read_text())
    assert [(row["engine"], row["gpus"]) for row in rows] == [
        (e, g) for g in (8, 16, 32, 64) for e in ("lazy", "sparse")
    ]
    assert set(rows[0]) >= ASKED
    assert png.read_bytes().startswith(b"\x89PNG")
    printed(*sweep, "--sweep", "nic=10,100")
    assert [row["nic_gbit"] for row in json.loads(file.read_text())] == [10, 10, 100, 100]


def test_published_rows_as_json(tmp_path: Path):
    file = tmp_path / "rows.json"
    text = printed("--rows", "--json", str(file))
    assert "measured between shaped hosts, nothing fitted: 60 rows" in text
    assert set(json.loads(file.read_text())[0]) >= {"name", "reported", "predicted", "error", "calibrated_on"}


def test_a_small_batch_is_warned_of():
    assert "the host sets the pace" in printed("--recipe", "resnet50-512gpu", "--set", "global_batch=4096")


def test_an_input_that_cannot_keep_up_is_warned_of(tmp_path: Path):
    file = tmp_path / "slow.toml"
    shipped = (cluster_folder() / "gradientflow-v.toml").read_text()
    file.write_text(shipped.replace('images_per_s = "unknown"', "images_per_s = 1000"))
    text = printed("--recipe", "alexnet-512gpu", "--cluster", str(file), "--sync", "lazy")
    assert "the input gives 1,000 images/s a node, and" in text


def test_no_torch_is_imported():
    code = "import sys; sys.modules['torch'] = None; from imagenet_fast.cli.main import app; app()"
    arguments = ["plan", "--recipe", "resnet50-512gpu", "--cluster", "dgx-h100", "--gpus", "4096"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "12"], "12 GPUs are no whole number of nodes of 8; take 8 or 16"),
        (["--sweep", "gpus=64..8"], "--sweep gpus=64..8: ranges go up"),
        (["--sweep", "gpus="], "--sweep gpus= is no sweep; write gpus=8..4096"),
        (["--sweep", "ranks=8"], "--sweep ranks=8 is no sweep"),
        (["--sweep", "nic=0"], "--sweep nic=0: ranges go up from 1"),
        (["--cluster", "dgx-h10"], "there is no cluster 'dgx-h10'; did you mean dgx-h100"),
        (["--cluster", "dgx-h100"], "dgx-h100: device h100 has no step times of alexnet_bn"),
        (["--png", "plan.png"], "--png plan.png draws a sweep; add --sweep"),
        (["--sync", "auto"], "--sync auto becomes one of the others"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], sentence: str):
    done = imagenet_fast("plan", "--recipe", "alexnet-512gpu", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
