"""Numbers that go wrong: one sentence that ends a run on all ranks at once, and nothing of them is saved."""

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

import tests
from imagenet_fast.checkpoint import CheckpointWriter, newest
from imagenet_fast.errors import JobAborted
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Unscaled
from imagenet_fast.run.result import RunResult
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.evaluation import StopRequested
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.nonfinite import NonFiniteLoss, describe_nonfinite
from imagenet_fast.training.precision import LossScaler
from tests.conftest import tiers
from tests.e2e.command import outcome_of, train_here
from tests.parallel.small import CPU, UNDIVIDED, Loop, Tiny
from tests.ranks import run, with_ranks
from tests.sync.loops import unmeasured
from tests.training.jobs import job_of


def test_the_streak_counts_losses_that_are_not_finite():
    scale, outcome = LossScaler(Unscaled(kind="fp32"), "fp32", CPU), RunResult("failed", "r", "lazy", 1, 1)
    meter, seen = Meter(tests.world(0, 1), 1, scale, 5, outcome), []
    for loss in (1.0, torch.nan, torch.inf, 0.0, 3e38, -torch.inf, torch.nan, torch.nan, -0.0):
        meter.add_loss(torch.tensor(loss))
        seen.append(int(meter.streak))
    assert seen == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    meter.add_loss(torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert meter.streak == 1


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
CASES: dict[str, tuple[dict[str, Any], Parallel]] = {
    **{name: ({"sync": sync}, UNDIVIDED) for name, sync in ENGINES.items()},
    "guarded": ({}, UNDIVIDED),
    "one rank": ({"drawn_images": 1, "spoils": False}, UNDIVIDED),
    "tp2dp2": ({"micro_batch": 4}, Parallel(tensor=2)),
    "pp2dp2": ({"micro_batch": 4}, Parallel(pipeline=2, micro_batches=2)),
}


@pytest.mark.parametrize("case", tiers(["dear", "guarded", "one rank"], CASES))
def test_every_engine_and_layout_ends_alike(case: str):
    changes, parallel = CASES[case]
    told, *others = run(2 if parallel is UNDIVIDED else 4, _told, changes, parallel)
    assert {*others} == {told}, "ranks tell the same"
    first = ", at first on rank 1 alone" if case == "one rank" else ""
    assert told == (
        f"the loss has not been finite for 3 steps, from step 5 on{first}; lower optim.lr or lengthen "
        "schedule.warmup_epochs, and begin another run; the last checkpoint is that of step 0"
    )


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
    """Ranks agree beside their steps, so that it is some steps later."""
    changes = {"stop": 6, "steps": 99_999, "nonfinite_steps": 99_999, "sync": ENGINES["lazy"]}
    told, _ = run(2, _told, changes, UNDIVIDED, tmp_path)
    assert re.match(r"the loss has not been finite for \d+ steps, from step 5 on; ", told)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("stop", "ended"), [(99, "not ended"), (5, "stopped")])
def test_a_last_step_that_is_skipped_costs_no_checkpoint(stop: int, ended: str, tmp_path: Path):
    """Of a run, or before a stop: an overflow has changed nothing."""
    changes = {"spoils": False, "drawn_images": 0, "steps": 5, "stop": stop}
    assert run(1, _told, changes, UNDIVIDED, tmp_path) == [ended]
    assert max(path.name for path in tmp_path.iterdir()) == "step-00000005"


@with_ranks(1)
def test_statistics_that_are_not_finite_are_not_saved():
    """No loss shows them, and weights are refused for them; a mask may be infinite."""
    norm = nn.BatchNorm2d(3)
    norm.mask = nn.Buffer(torch.zeros(()))
    state = Loop("tiny").begin(nn.Sequential(norm, Tiny())).state
    assert state.is_finite()
    norm.mask.fill_(torch.inf)
    assert state.is_finite()
    norm.running_var.fill_(torch.inf)
    assert not state.is_finite()
    state.sync.close()


def test_whoever_does_not_want_to_be_stopped_is_not_and_all_is_saved(tmp_path: Path):
    assert run(2, _told, {"nonfinite_steps": 0}, UNDIVIDED, tmp_path) == ["not ended"] * 2
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 8


@pytest.mark.ci
def test_a_run_that_ended_so_leaves_its_last_good_checkpoint(tmp_path: Path):
    """In the second epoch the rate is 1e30 times what it was: step 9 leaves wild weights, and 10 has no loss."""
    for resumed, most, steps in (
        (0, 2, 2),
        (1, 100, 7),  # at the end of the second epoch, where there are no final weights to be had
    ):
        run(2, _explode, tmp_path, most, fresh=True)
        outcome, kept = outcome_of(tmp_path), newest(RunDir(tmp_path).checkpoints)
        begins = f"the loss has not been finite for {steps} steps, from step 10 on; lower optim.lr "
        assert re.fullmatch(f"{begins}.*; the last checkpoint is that of step 9", outcome["message"])
        assert (outcome["status"], outcome["resumed"], outcome["wrong_from"]) == ("failed", resumed, 10)
        assert kept is not None
        assert kept.manifest.step == 9
        assert not RunDir(tmp_path).final_weights.exists()


def _explode(folder: Path, most: int) -> None:
    explodes = {"kind": "step", "milestones": [1.0], "gamma": 1e30}
    small = {"global_batch": 8, "micro_batch": 2, "checkpoint": {"every_steps": 1}, "nonfinite_steps": most}
    with pytest.raises(JobAborted):
        train_here(job_of(folder, resume=True, schedule=explodes, **small))


def _make_wild(model: nn.Module) -> None:
    """Where the layers are held, make their weights wild, though finite."""
    for layer, name, value in (("classifier.4", "weight", 3e38), ("classifier.1", "bias", 10.0)):
        with suppress(AttributeError), torch.no_grad():
            model.get_submodule(layer).get_parameter(name).fill_(value)


@unmeasured()
def _told(changes: dict[str, Any], parallel: Parallel = UNDIVIDED, folder: Path | None = None) -> str:
    """Why training ended that goes wrong after its fourth step, with a report and a checkpoint after every one."""
    own = {"sync": GUARDED, "nonfinite_steps": 3, "global_batch": 16, "checkpoint": {"every_steps": 1}} | changes
    spoils, stop, steps = own.pop("spoils", True), own.pop("stop", 999), own.pop("steps", 8)
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
            if step == 3 and spoils:
                take_step.state.settle()
                _make_wild(take_step.state.model)
            try:
                keep.before_step(take_step.state)
            except StopRequested:
                keep.save_for_stop(take_step.state)
                return "stopped"
        if writer is not None:
            writer.wait()
    except NonFiniteLoss:
        _, why = describe_nonfinite(take_step.state.streak, take_step.state.step)
        return f"{why}; the last checkpoint is that of step {keep.last_saved()}"
    finally:
        keep.close()
        if writer is not None:
            writer.close()
        take_step.state.sync.close()
    return "not ended"
