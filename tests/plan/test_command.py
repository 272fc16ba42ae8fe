"""`imagenet-fast plan` as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
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


def test_epochs_that_are_too_few_at_a_larger_batch_are_warned_of():
    arguments = ("--recipe", "resnet50-8gpu", "--cluster", "dgx-h100", "--sync", "lazy", "--gpus")
    told = "MLCommons' reference needs 43.8 to 45.9 epochs to 75.9 % at a batch of 12800, and the recipe has 37"
    assert told in printed(*arguments, "32")
    assert "--set epochs=47" in printed(*arguments, "32")
    for enough in (
        ("8",),
        ("32", "--set", "epochs=47"),
        ("32", "--scaling", "strong"),
        ("32", "--set", "optim.kind=sgd"),
    ):
        assert "MLCommons' reference" not in printed(*arguments, *enough), enough


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


def test_a_batch_larger_than_the_training_set_is_refused_as_by_train(refusal: Callable[..., str]):
    many = ("plan", "--recipe", "resnet50-512gpu", "--cluster", "dgx-h100", "--sync", "lazy")
    told = refusal(*many, "--gpus", "16384")
    assert "16384 GPUs have a global batch of 2097152, more than the 1281167 training images; take fewer GPUs" in told
    swept = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*many, "--sweep", "gpus=8192,16384"])
    assert swept.exit_code == 0
    assert "warning: 16384 GPUs are left out: 16384 GPUs have a global batch" in swept.stderr
    assert "lazy bf16" in swept.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--set", "sync.wire=fp32"],
            "--set sync.wire=fp32 is of the recipe's engine, and plan predicts those of --sync",
        ),
        (["--set", "sync={kind='lazy'}"], "is of the recipe's engine"),
        (["--rows"], "--recipe does not go with --rows"),
        (["--validate", "--gpus", "64"], "--gpus does not go with --validate"),
        (["--sweep", "gpus=8..16", "--gpus", "64"], "--gpus does not go with --sweep gpus="),
    ],
)
def test_no_option_is_ignored(arguments: list[str], told: str, refusal: Callable[..., str]):
    assert told in refusal("plan", "--recipe", "alexnet-512gpu", *arguments)


def test_keys_of_an_engine_count_where_all_are_predicted():
    usual, pairwise = (
        printed("--recipe", "alexnet-512gpu", *more) for more in ((), ("--set", "lazy.collective=pairwise"))
    )
    lines = [
        {line.split()[0]: line.split() for line in text.splitlines() if "bf16" in line and "GPU" not in line}
        for text in (usual, pairwise)
    ]
    assert lines[0]["lazy"] != lines[1]["lazy"]
    assert lines[0]["dear"] == lines[1]["dear"]


def test_steps_of_16_bits_are_no_promise_for_fp32(capfd: pytest.CaptureFixture[str]):
    eight = ("--recipe", "resnet50-8gpu", "--cluster", "dgx-h100", "--sync", "lazy")
    for kind, bits in (("fp32", 32), ("bf16", 16)):
        done = CliRunner().invoke(app, ["plan", *eight, "--set", f"precision.kind={kind}"])
        assert f"activations in {bits} bits" in " ".join(done.stdout.split())
        assert (f"of 16 bits, so with precision.kind {kind} a step takes longer" in done.stderr) == (bits == 32)


def test_a_recipe_is_planned_though_its_own_engine_could_not_train_it():
    """`alexnet-512gpu` names `dear`, which cannot clip; `train --sync lazy` may."""
    assert "lazy bf16" in printed("--recipe", "alexnet-512gpu", "--sync", "lazy", "--set", "clip_norm=1")
