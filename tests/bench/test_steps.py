"""Steps and pipelines measured small: the figures are there, and say what they are of."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tests
from imagenet_fast.bench.checkpoint_overhead import Saving
from imagenet_fast.bench.pipeline import peak_activations
from imagenet_fast.bench.tables import checkpoint_table, step_table
from imagenet_fast.bench.train_step import bench_step, no_data_parallel, over_gpus, step_recipe
from imagenet_fast.recipe.schema import BFloat16
from tests.bench.small import Rows, benched


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_is_timed_beside_the_plain_loop(precision: str):
    variants = [step_recipe("resnet18", 32, 2, precision, False, sync) for sync in ("lazy", "allreduce")]
    rows = bench_step(variants[0], variants, rounds=1, steps=1)
    assert [row.loop for row in rows] == ["plain PyTorch", "ours, lazy", "ours, allreduce"]
    assert rows[0].ratio_to_plain == 1
    assert all(row.step_s > 0 and row.warmup_s > 0 for row in rows)
    assert all(row.host_s is None for row in rows), "without a GPU the host does not run ahead"
    assert step_table(rows).row_count == 3


@pytest.mark.ci
def test_what_checkpoints_cost_is_timed_beside_the_same_loop_without():
    recipe = step_recipe("resnet18", 32, 2, "fp32", False)
    rows = bench_step(recipe, [recipe], rounds=1, steps=9, checkpoint_every=2)
    assert [row.loop for row in rows] == ["plain PyTorch", "ours, lazy", "ours, lazy, saved"]
    assert all(row.ratio_to_unsaved is row.stood_s is None for row in rows[:2])
    assert rows[2].ratio_to_unsaved == rows[2].step_s / rows[1].step_s
    assert rows[2].stood_s > rows[2].copied_s > 0
    assert list(map(str, checkpoint_table(rows).columns[0].cells)) == ["ours, lazy"]


@pytest.mark.parametrize("every", [1, 2, 5, 20])
def test_a_rounds_first_step_is_saved_and_the_next_rounds_again(every: int, tmp_path: Path):
    warmup, outcome = 2, SimpleNamespace(epochs=1, top1=None)
    state: Any = SimpleNamespace(settle=lambda: None, is_finite=lambda: True, shared=dict, own=dict, outcome=outcome)
    recipe = step_recipe("resnet18", 32, 2, "fp32", False)
    with closing(Saving(recipe, tests.world(0, 1), state, tmp_path, every, warmup)) as saving:
        saves = []
        for _ in range(warmup + 3 * every):
            state.step += 1
            saving(state)
            saves.append(len(saving.stood.all_s))
        saving.settle()
    assert [after > before for before, after in pairwise(saves[warmup - 1 :])] == 3 * ([True] + (every - 1) * [False])


def test_data_parallel_is_skipped_with_a_reason_and_casts_in_the_forward_itself(monkeypatch: pytest.MonkeyPatch):
    """Here without a GPU; `tests/gpu` looks at its threads."""
    for gpus, compiled, reason in (
        (0, False, "it spreads a batch over GPUs, and of them there are none"),
        (1, True, "it spreads a batch over GPUs, and of them there is one"),
        (2, True, "it copies the model in every step, and blocks are compiled for one"),
        (2, False, None),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        told = no_data_parallel(step_recipe("resnet18", 32, 2, "bf16", compiled))
        assert told is None if reason is None else told.startswith(f"nn.DataParallel was skipped: {reason}")
    spread = over_gpus(torch.nn.Linear(3, 2), BFloat16(kind="bf16"), 2)
    assert spread(torch.ones(4, 3)).dtype == torch.bfloat16


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
