"""A pipeline's bubble, memory and speed, measured small."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_fast.bench.pipeline import peak_activations
from tests.e2e.command import in_process


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Two stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    printed = in_process(
        "bench", "pipeline", "--stages", "2", "--micro-batches", "1,4", "--model", "resnet18", "--image-size", "32",
        "--batch", "8", "--precision", "fp32", "--sleep", "0.002", "--rounds", "2", "--device", "cpu",
        "--json", str(folder / "rows.json"), "--png", str(folder / "rows.png"),
    )  # fmt: skip
    assert (folder / "rows.png").stat().st_size > 10_000
    return json.loads((folder / "rows.json").read_text()), printed


def test_rows_by_schedule_and_micro_batches(
    measured: tuple[list[dict[str, Any]], str],
):
    rows, printed = measured
    assert [(row["schedule"], row["micro_batches"], row["expected_bubble"]) for row in rows] == [
        ("gpipe", 1, pytest.approx(1 / 2)), ("gpipe", 4, pytest.approx(1 / 5)), ("1f1b", 4, pytest.approx(1 / 5)),
        ("interleaved", 1, pytest.approx(1 / 3)), ("interleaved", 4, pytest.approx(1 / 9)),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["bubble"] < 1
        assert row["step_s"] > row["micro_batches"] * 3 * 0.002
        assert row["images_per_s"] > 0
        assert len(row["activation_bytes"]) == row["stages"] == 2
    assert "resnet18, 2 ranks in a pipeline" in printed
    assert all(len(line) <= 80 for line in printed.splitlines()), printed


def test_timeline_has_every_pass_one_at_a_time(
    measured: tuple[list[dict[str, Any]], str],
):
    for row in measured[0]:
        stages = 4 if row["schedule"] == "interleaved" else 2
        passes = [(busy["stage"], busy["which"]) for busy in row["timeline"]]
        for stage in range(stages):
            assert passes.count((stage, "forward")) == passes.count((stage, "backward")) == row["micro_batches"]
        for rank in range(2):
            own = [busy for busy in row["timeline"] if busy["stage"] % 2 == rank]
            for before, after in pairwise(own):
                assert 0 <= before["begin_s"] <= before["end_s"] <= after["begin_s"]
            assert own[-1]["end_s"] <= row["step_s"] * 1.5


def test_the_first_stage_keeps_fewer_micro_batches_under_1f1b(measured: tuple[list[dict[str, Any]], str]):
    gpipe, one_by_one = (
        row["activation_bytes"] for row in measured[0] if row["micro_batches"] == 4 and row["schedule"] != "interleaved"
    )
    assert one_by_one[0] < 0.6 * gpipe[0]  # two of four
    assert one_by_one[1] < 0.4 * gpipe[1]  # one of four


def test_what_autograd_keeps_is_counted_once_and_given_back():
    layer = nn.Linear(10, 10)
    values = torch.randn(5, 10)

    def twice() -> None:
        for _ in range(2):
            hidden = layer(values).exp()  # keeps its result
            (hidden * hidden).sum().backward()  # keeps it too

    assert peak_activations(twice, [values, *layer.parameters()], torch.device("cpu")) == 4 * 5 * 10
    assert peak_activations(twice, list(layer.parameters()), torch.device("cpu")) == 2 * 4 * 5 * 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--micro-batches", "1,x"), "--micro-batches 1,x is not a list of whole numbers"),
        (("--micro-batches", "0"), "is not a list of whole numbers above 0"),
        (
            ("--micro-batches", "3", "--batch", "8"),
            "--batch 8 does not make 3 equal micro-batches; take",
        ),
        (("--schedules", "gpipe,zbv"), "--schedules: schedule zbv is not one of gpipe, 1f1b and interleaved"),
        (("--schedules", "1f1b", "--micro-batches", "2"), "1f1b has a micro-batch for each of 4 stages at least"),
        (("--device", "cuda", "--stages", "19"), "GPUs for 19 stages"),
        (("--device", "tpu"), "neither cpu nor cuda"),
        (("--model", "vgg"), "vgg"),
        (("--image-size", "32", "--micro-batches", "2,32"), "a single value of each channel"),
        (("--model", "alexnet", "--image-size", "62"), "too small for alexnet"),
        (("--model", "alexnet", "--stages", "9"), "AlexNet comes in 8 pieces, too few for 9 stages"),
        (("--model", "alexnet", "--stages", "5", "--schedules", "interleaved"), "too few for 10 stages"),
    ],
)
def test_what_cannot_be_measured_is_refused(refusal: Callable[..., str], options: tuple[str, ...], said: str):
    assert said in refusal("bench", "pipeline", "--schedules", "gpipe", *options)
