"""A pipeline's bubble, memory and speed, measured small."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from imagenet_fast.bench.pipeline import peak_activations
from tests.bench.small import Rows, benched


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Two stages."""
    words = (
        "pipeline --stages 2 --micro-batches 1,4 --model resnet18 --image-size 32 --batch 8 --precision fp32 "
        "--sleep 0.002 --rounds 2 --device cpu"
    )
    return benched(tmp_path_factory.mktemp("pipeline"), words)


@pytest.mark.ci
class TestTwoStages:
    def test_rows_by_schedule_and_micro_batches(self, measured: Rows):
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

    def test_timeline_has_every_pass_one_at_a_time(self, measured: Rows):
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

    def test_the_first_stage_keeps_fewer_micro_batches_under_1f1b(self, measured: Rows):
        kept = {row["schedule"]: row["activation_bytes"] for row in measured[0] if row["micro_batches"] == 4}
        assert kept["1f1b"][0] < 0.6 * kept["gpipe"][0]  # two of four
        assert kept["1f1b"][1] < 0.4 * kept["gpipe"][1]  # one of four


def test_what_autograd_keeps_is_counted_once_and_given_back():
    layer = nn.Linear(10, 10)
    values = torch.randn(5, 10)

    def twice() -> None:
        for _ in range(2):
            hidden = layer(values).exp()  # keeps its result
            (hidden * hidden).sum().backward()  # keeps it too

    assert peak_activations(twice, [values, *layer.parameters()], torch.device("cpu")) == 4 * 5 * 10
    assert peak_activations(twice, list(layer.parameters()), torch.device("cpu")) == 2 * 4 * 5 * 10
