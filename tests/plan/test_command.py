"""`imagenet-fast plan` as it is called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from imagenet_fast.cli.main import app
from imagenet_fast.recipe.load import shipped

EIGHT = "--recipe resnet50-8gpu --cluster dgx-h100 --sync lazy"
ALEXNET = "--recipe alexnet-512gpu --cluster gradientflow-v"
MANY = "--recipe resnet50-512gpu --cluster dgx-h100 --sync lazy"


def planned(options: str) -> Result:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *options.split()], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_a_plan_has_a_table_a_verdict_a_dry_run_and_the_kind_of_each_input():
    text = planned(ALEXNET).output
    for part in (
        "auto would take dear bf16\n",
        "512 ranks, micro-batch 128", "memory a GPU", "images/s a node", "is assumed to be reached", "(published)",
        "(assumed)", "circular", "what the loader feeds a node is unknown",
    ):  # fmt: skip
        assert part in text, part


def test_rows_and_picture_of_a_sweep(tmp_path: Path):
    file, png = tmp_path / "rows.json", tmp_path / "plan.png"
    sweep = f"--recipe resnet50-512gpu --cluster gradientflow-v --sync lazy,sparse --json {file} --png {png} --sweep"
    planned(f"{sweep} gpus=8..64")
    rows = json.loads(file.read_text())
    assert [(row["engine"], row["gpus"]) for row in rows] == [
        (engine, gpus) for gpus in (8, 16, 32, 64) for engine in ("lazy", "sparse")
    ]
    assert png.read_bytes().startswith(b"\x89PNG")
    planned(f"{sweep} nic=10,100")
    assert [row["nic_gbit"] for row in json.loads(file.read_text())] == [10, 10, 100, 100]


def test_small_batches_and_an_input_that_cannot_keep_up_are_warned_of(tmp_path: Path):
    for batch in (64, 3200):
        done = planned(f"{EIGHT} --gpus 8 --set global_batch={batch}")
        assert ("the host sets the pace" in done.output) == (batch == 64)
    file = tmp_path / "slow.toml"
    written = shipped("cluster")["gradientflow-v"].read_text()
    file.write_text(written.replace('images_per_s = "unknown"', "images_per_s = 1000"))
    text = planned(f"--recipe alexnet-512gpu --sync lazy --cluster {file}").output
    assert "the input gives 1,000 images/s a node, and" in text


WRONG = {
    "--gpus 12": "12 GPUs are no whole number of nodes of 8; take 8 or 16",
    "--sweep gpus=64..8": "--sweep gpus=64..8: ranges go up",
    "--sweep gpus=": "--sweep gpus= is no sweep; write gpus=8..4096",
    "--sweep ranks=8": "--sweep ranks=8 is no sweep",
    "--sweep nic=0": "--sweep nic=0: ranges go up from 1",
    "--cluster dgx-h10": "there is no cluster 'dgx-h10'; did you mean dgx-h100",
    "--png plan.png": "--png plan.png draws a sweep; add --sweep",
    "--sync auto": "--sync auto becomes one of the others",
    "--set sync.wire=fp32": "--set sync.wire=fp32 is not ENGINE.KEY=VALUE with an engine of --sync ddp,",
    "--sync lazy row": "row belongs to no option and is not KEY=VALUE",
    "--sweep gpus=8..16 --gpus 64": "--gpus does not go with --sweep gpus=",
    f"{MANY} --gpus 16384": "16384 GPUs have a global batch of 2097152, more than the 1281167 training images; take",
}


def test_wrong_usage_is_one_sentence_and_no_option_is_ignored(refusal: Callable[..., str]):
    for options, sentence in WRONG.items():
        given = () if "--cluster" in options else ("--cluster", "gradientflow-v")
        assert sentence in refusal("plan", "--recipe", "alexnet-512gpu", *given, *options.split()), options


def test_a_sweep_leaves_out_what_cannot_be():
    swept = planned(f"{MANY} --sweep gpus=8192,16384")
    assert "warning: 16384 GPUs are left out: 16384 GPUs have a global batch" in swept.stderr
    assert "lazy    bf16" in swept.stdout


def test_keys_of_an_engine_count_where_all_are_predicted():
    def rows(more: str = "") -> dict[str, list[str]]:
        lines = planned(f"{ALEXNET} {more}").output.splitlines()
        return {line.split()[0]: line.split() for line in lines if " bf16 " in line}

    usual, pairwise = rows(), rows("--set lazy.collective=pairwise")
    assert usual["lazy"] != pairwise["lazy"]
    assert usual["dear"] == pairwise["dear"]


@pytest.mark.parametrize(("kind", "bits"), [("fp32", 32), ("bf16", 16)])
def test_steps_of_16_bits_are_no_promise_for_fp32(kind: str, bits: int):
    done = planned(f"{EIGHT} --set precision.kind={kind}")
    assert f"activations in {bits} bits" in " ".join(done.stdout.split())
    assert (f"of 16 bits, so with precision.kind {kind} a step takes longer" in done.stderr) == (bits == 32)


def test_a_recipe_is_planned_though_its_own_engine_could_not_train_it():
    """`alexnet-512gpu` names `dear`, which cannot clip; `train --sync lazy` may."""
    assert "lazy    bf16" in planned(f"{ALEXNET} --sync lazy clip_norm=1").output


CARDS = {
    "": "this machine was asked, and it has no GPUs that nvidia-smi shows; there are abci, cloud-25g",
    "Voodoo 2, 12\n": "this machine was asked, and nothing is known of its Voodoo 2; there are abci",
}


@pytest.mark.usefixtures("subprocesses")
def test_without_a_cluster_the_machine_is_asked(tmp_path: Path, refusal: Callable[..., str], monkeypatch):
    def has(cards: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{cards}'\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for cards, sentence in CARDS.items():
        has(cards)
        assert sentence in refusal("plan", "--recipe", "resnet50-8gpu")
    has(4 * "NVIDIA H100 80GB HBM3, 81559\n")
    text = planned("--recipe resnet50-512gpu --sync lazy").output
    assert "4 ranks, micro-batch 128" in text
    assert "this machine, 4 x NVIDIA H100 80GB HBM3; its links are assumed to be those of dgx-h100" in text
    assert "nic.gbit is unknown" in refusal("plan", "--recipe", "resnet50-512gpu", "--gpus", "8")
    has("NVIDIA A100 80GB PCIe, 81920\n")
    assert "its links are assumed to be those of pcie-a100" in planned("--recipe resnet50-1gpu").output
