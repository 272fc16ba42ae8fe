"""Numbers that go wrong: the layer that shows it first, and one sentence that ends a run on all ranks at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.checkpoint import CheckpointWriter, newest
from imagenet_fast.errors import JobAborted
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.models.resnet import BasicBlock, ResNet
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.evaluation import StopRequested
from imagenet_fast.training.nonfinite import NonFiniteCounter, NonFiniteLoss, is_finite, trace_nonfinite
from imagenet_fast.training.nonfinite_report import nonfinite_message
from imagenet_fast.training.train_step import TrainingStep
from tests.conftest import tiers
from tests.e2e.command import outcome_of, train_here
from tests.parallel.small import CPU, UNDIVIDED, Loop, Tiny, images_of, small_model
from tests.ranks import run
from tests.sync.loops import unmeasured
from tests.training.jobs import job_of


def first(model: nn.Module, *inputs: Any, **named: Any) -> str | None:
    """By name; None: no layer is."""
    with trace_nonfinite(model) as watch:
        model(*inputs, **named)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return next((name for name, module in model.named_modules() if module is watch.first), None)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("alexnet", "features.0"), ("alexnet", "classifier.6"), ("resnet18", "layer2.0.downsample.0")],
)
def test_a_layer_is_named_wherever_it_is(kind: str, layer: str):
    model = small_model(kind)
    images, _ = images_of(kind, 0, 2)
    assert first(model, images) is None
    with torch.no_grad():
        model.get_submodule(layer).weight[0].fill_(torch.inf)  # of one channel, which all layers behind it read
    assert first(model, images) == layer


class Odd(nn.Module):
    """A layer called twice, tuples, keywords and dictionaries, and arithmetic between the layers."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4, bias=False)
        self.pair = Pair(wrong)
        self.wrong = wrong
        nn.init.constant_(self.twice.weight, 1e20)

    def forward(self, values: Tensor, *, scale: dict[str, Tensor], times: int = 1) -> dict[str, Any]:
        values = self.twice(values)
        if self.wrong == "twice":
            values = self.twice(values)
        if self.wrong == "itself":
            values = values * 1e30 * 1e30
        some, (other, *_) = self.pair(values, scale=scale["by"], number=torch.tensor(3))
        return {"logits": (some, [other]), "times": times, "name": None}


class Pair(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, values: Tensor, scale: Tensor, number: Tensor) -> tuple[Tensor, list[Tensor]]:
        return values, [values - torch.inf if self.wrong == "pair" else values * scale, number]


@pytest.mark.parametrize(("wrong", "name"), [("", None), ("twice", "twice"), ("pair", "pair"), ("itself", "")])
def test_it_may_be_called_twice_and_return_anything(wrong: str, name: str | None):
    assert first(Odd(wrong), torch.ones(2, 4), scale={"by": torch.ones(())}) == name


def test_what_comes_in_is_no_layers_fault_be_it_by_keyword():
    for inputs, scale in ((torch.full((2, 4), torch.nan), 1.0), (torch.ones(2, 4), torch.inf)):
        model = Odd()
        with trace_nonfinite(model) as watch:
            model(inputs, scale={"by": torch.tensor(scale)})
        assert watch.arrived_so
        assert watch.first is None


def test_an_overflow_of_16_bits_is_seen_where_it_happens():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        model[0].weight.fill_(300.0)
        model[2].weight.fill_(300.0)
    with torch.autocast("cpu", torch.float16):
        assert first(model, torch.ones(4, 8)) == "2"
    with torch.autocast("cpu", torch.bfloat16):
        assert first(model, torch.ones(4, 8)) is None


@pytest.mark.ci
def test_compiled_layers_are_looked_at_all_the_same():
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
    model.compile_stem(backend="eager")
    model.layer3[0].compile(backend="eager")
    model(torch.randn(2, 3, 32, 32))
    for layer in ("bn1", "layer3.0.conv2"):
        with torch.no_grad():
            model.get_submodule(layer).weight[0].fill_(torch.inf)
        assert first(model, torch.randn(2, 3, 32, 32)) == layer
        nn.init.ones_(model.get_submodule(layer).weight)


def test_only_floating_point_can_be_other_than_finite():
    assert is_finite([torch.tensor([2**31 - 1]), (torch.tensor(True), {"a": None, "b": "nan"}), torch.empty(0)])
    assert not is_finite({"a": [torch.zeros(2), torch.tensor([0.0, torch.nan], dtype=torch.bfloat16)]})
    assert not is_finite((torch.tensor(complex(0, float("inf"))),))


def test_the_streak_counts_losses_that_are_not_finite():
    streak = NonFiniteCounter(CPU)
    seen = []
    for loss in (1.0, torch.nan, torch.inf, 0.0, 3e38, -torch.inf, torch.nan, torch.nan, -0.0):
        streak.add(torch.tensor(loss))
        seen.append(int(streak))
    assert seen == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    streak.add(torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert int(streak) == 1


SILENT = MetricLogger(lambda: 0.0)
ENGINES: dict[str, dict[str, Any]] = {
    "lazy": {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.01},
    "hybrid": {"kind": "hybrid", "wire": "bf16"},
    "dear": {"kind": "dear", "wire": "fp32"},
    "sparse": {"kind": "sparse", "chunk": 64, "sparsity": 0.8, "dense_epochs": 0, "ramp_epochs": 0},
    "ddp": {"kind": "ddp", "wire": "fp32"},
}
GUARDED = {"kind": "hybrid", "wire": "fp16"}
"""With gradients that are looked at: a step that cannot be used changes no weight."""
SPOILT = "rank 0 8 of its 8 parameters and statistics are not finite, the first of them in features.0 (Conv2d); lower "
CASES: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"sync": ENGINES[name]}, SPOILT) for name in ("lazy", "hybrid", "dear", "ddp")},
    "sparse": ({"sync": ENGINES["sparse"]}, " are not finite, the first of them in classifier."),
    "layer": ({}, "rank 0 classifier.4 (Linear) is the first layer whose output is not finite though its input is; "),
    "images": (
        {"drawn_images": 1, "spoil": "nothing"},
        "rank 1 the images are not finite; see to data.mean, data.std and the images; ",
    ),
    "loss": ({"spoil": "loss"}, "on rank 0 the loss is not finite, though the network's output is"),
}
LAYOUTS = {
    "tp4": (Parallel(tensor=4), "0 classifier.4 (RowParallel)"),
    "tp2dp2": (Parallel(tensor=2), "0 classifier.4 (RowParallel)"),
    "pp2dp2": (Parallel(pipeline=2, micro_batches=2), "2 classifier.4 (Linear)"),
    "interleaved": (Parallel(pipeline=2, micro_batches=4, schedule="interleaved"), "0 classifier.4 (Linear)"),
    "pp2tp2": (Parallel(pipeline=2, tensor=2, micro_batches=2), "2 classifier.4 (RowParallel)"),
}


@pytest.mark.parametrize("case", tiers(["dear", "layer", "images", "loss"], CASES))
def test_every_engine_ends_alike_and_names_the_layer_and_the_rank(case: str):
    changes, expected = CASES[case]
    told, other = run(2, _told, changes)
    assert told == other, "ranks tell the same"
    assert told.startswith("the loss has not been finite for 3 steps, from step 5 on: on rank "), told
    assert told.endswith("; no checkpoint had been written")
    assert "see to" in told or "lower optim.lr or lengthen schedule.warmup_epochs, and begin another run" in told
    assert expected in told, told


@pytest.mark.ci
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rank_that_holds_the_layer_says_so(layout: str):
    parallel, where = LAYOUTS[layout]
    told, *others = run(4, _told, {"micro_batch": 4}, parallel)
    assert {*others} == {told}
    assert f"on rank {where} is the first layer whose output" in told


@pytest.mark.parametrize("name", tiers(["hybrid"], ["dear", "lazy"]))
def test_nothing_is_saved_while_the_loss_is_not_finite(name: str, tmp_path: Path):
    """Hybrid and dear update a layer in the next forward. That of step 4 has weights that are wild, though finite."""
    for told in run(2, _told, {"sync": ENGINES[name]}, UNDIVIDED, tmp_path):
        assert told.endswith("; the last checkpoint is that of step 4")
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 4
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000003", "step-00000004"], "no later one has displaced them"
    assert all(tensor.isfinite().all() for tensor in found.shared["model"].values())


def test_who_is_told_to_stop_while_numbers_are_wrong_saves_nothing(tmp_path: Path):
    """Ranks vote beside their steps, so that it is some steps later."""
    changes = {"stop": 6, "steps": 99, "nonfinite_steps": 99, "sync": ENGINES["lazy"]}
    told, _ = run(2, _told, changes, UNDIVIDED, tmp_path)
    assert re.match(r"the loss has not been finite for \d+ steps, from step 5 on: ", told)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("stop", "ended"), [(99, "not ended"), (5, "stopped")])
def test_a_last_step_that_is_skipped_costs_no_checkpoint(stop: int, ended: str, tmp_path: Path):
    """Of a run, or before a stop: an overflow has changed nothing."""
    changes = {"spoil": "nothing", "drawn_images": 0, "steps": 5, "stop": stop}
    assert run(1, _told, changes, UNDIVIDED, tmp_path) == [ended]
    assert max(path.name for path in tmp_path.iterdir()) == "step-00000005"


def test_statistics_that_are_not_finite_are_not_saved():
    """No loss shows them, and weights are refused for them; a mask may be infinite."""
    assert run(1, _sound, "running_var") == [(True, False)]
    assert run(1, _sound, "mask") == [(True, True)]


def _sound(name: str) -> tuple[bool, bool]:
    norm = nn.BatchNorm2d(3)
    norm.mask = nn.Buffer(torch.zeros(()))
    state = Loop("tiny").begin(nn.Sequential(norm, Tiny())).state
    sound = state.is_finite()
    norm.get_buffer(name).fill_(torch.inf)
    try:
        return sound, state.is_finite()
    finally:
        state.sync.close()


def test_whoever_does_not_want_to_be_stopped_is_not_and_all_is_saved(tmp_path: Path):
    assert run(2, _told, {"nonfinite_steps": 0}, UNDIVIDED, tmp_path) == ["not ended"] * 2
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 8


@pytest.mark.ci
def test_a_run_that_ended_so_leaves_its_last_good_checkpoint(tmp_path: Path):
    """In the second epoch the rate is 1e30 times what it was: step 9 leaves wild weights, and 10 has no loss."""
    where = r"\d+ of its \d+ parameters and statistics are not finite, the first of them in [\w.]+ \(\w+\)"
    for resumed, most, steps in (
        (0, 2, 2),
        (1, 100, 7),  # at the end of the second epoch, where there are no final weights to be had
    ):
        run(2, _explode, tmp_path, most, fresh=True)
        outcome, kept = outcome_of(tmp_path), newest(RunDir(tmp_path).checkpoints)
        begins = f"the loss has not been finite for {steps} steps, from step 10 on: on rank 0 {where}; lower optim.lr "
        ends = "; the last checkpoint is that of step 9"
        assert re.fullmatch(f"{begins}.*{ends}", outcome["message"]), outcome["message"]
        assert (outcome["status"], outcome["resumed"], outcome["wrong_from"]) == ("failed", resumed, 10)
        assert kept is not None
        assert kept.manifest.step == 9
        assert not RunDir(tmp_path).final_weights.exists()


def _explode(folder: Path, most: int) -> None:
    explodes = {"kind": "step", "milestones": [1.0], "gamma": 1e30}
    small = {"global_batch": 8, "micro_batch": 2, "checkpoint": {"every_steps": 1}, "nonfinite_steps": most}
    with pytest.raises(JobAborted):
        train_here(job_of(folder, resume=True, schedule=explodes, **small))


def _spoil(what: str, take_step: TrainingStep) -> None:
    """Make weights wild, though finite, where they are held."""
    held = take_step.state.model.get_submodule
    with torch.no_grad():
        if what == "loss":  # the first class is by far the likeliest, whatever is seen
            held("classifier.6").bias.copy_(torch.tensor([3e38, -3e38, 0, 0, 0]))
        if what == "layer":
            with suppress(AttributeError):
                held("classifier.4").weight.fill_(3e38)
            with suppress(AttributeError):
                held("classifier.1").bias.fill_(10.0)  # of which every image's overflow


@unmeasured()
def _told(changes: dict[str, Any], parallel: Parallel = UNDIVIDED, folder: Path | None = None) -> str:
    """Why training ended that goes wrong after its fourth step, with a report and a checkpoint after every one."""
    own = {"sync": GUARDED, "nonfinite_steps": 3, "global_batch": 16, "checkpoint": {"every_steps": 1}} | changes
    spoil, stop, steps = own.pop("spoil", "layer"), own.pop("stop", 999), own.pop("steps", 8)
    drawn_images = own.pop("drawn_images", None)
    loop = Loop("tiny", parallel, **own)
    torch.manual_seed(0)
    take_step, writer = loop.begin(Tiny()), None
    if folder is not None:
        writer = CheckpointWriter(folder, loop.world, dist.distributed_c10d._get_default_store(), keep=1)
    job = Job("test", loop.recipe, loop.batching, None, folder or Path())
    keep = CheckpointManager(job, loop.world, writer, {}, lambda: take_step.state.step >= stop)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loop.batches(step):
            if step >= 4 and loop.world.rank == drawn_images:
                images[:, 0, 2, 2] = torch.nan
            yield images, labels

    try:
        for step in range(steps):
            take_step(batches(step), 0.05)
            take_step.meter.report(SILENT, step, 1, 0.05)
            if step == 3:
                take_step.state.settle()
                _spoil(spoil, take_step)
            keep.after_step(take_step.state)
        if writer is not None:
            writer.wait()
    except StopRequested:
        return "stopped"
    except NonFiniteLoss:
        told = nonfinite_message(take_step, keep, loop.world)
        take_step.state.sync.end_backward()  # of the micro-batch that was repeated
        return told
    finally:
        keep.close()
        if writer is not None:
            writer.close()
        take_step.state.sync.close()
    return "not ended"
