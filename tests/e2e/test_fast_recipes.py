"""What the fastest single-node recipes need, all together, as a small run: trained, resumed, evaluated and exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchvision.models import resnet18

import tests
from imagenet_fast.launch.evaluate import EvalResult, judge
from imagenet_fast.launch.export import export_weights
from imagenet_fast.metrics.report import FINAL_WEIGHTS, read_run, report_table
from imagenet_fast.metrics.run_result import RunResult
from imagenet_fast.models.blurpool import add_blurpool
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.job import Evaluation, Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import tables
from tests.e2e.command import events_of, outcome_of, train_here
from tests.parallel import small
from tests.ranks import run

OPTIM = {
    "kind": "sgd", "lr": 0.05, "momentum": 0.875, "weight_decay": 5e-3, "decay_all": True, "decoupled": True
}  # fmt: skip
ci = pytest.mark.ci


def mild(engine: str, epochs: int = 2, **changes: Any) -> Recipe:
    recipe = {
        "epochs": epochs, "loss": "bce", "label_smoothing": 0.08, "ema_decay": 0.5, "eval_mirror": True,
        "eval_shift": 1,
        "optim": OPTIM, "schedule": {"kind": "step", "milestones": []}, "sync": {"kind": engine, "wire": "fp32"},
        "model": {
            "kind": "resnet18", "blurpool": "conv_maxpool",
            "init": ["kaiming_normal", "bn_uniform", "linear_log_constant_bias"],
        },
        "data": {
            "dataset": "digits", "loader": "folder", "image_size": 40, "resize": 48, "eval_size": 48, "workers": 1,
            "sizes": [[1, 32], [3, 40]], "size_multiple": 4, "flip": "alternate",
        },
        "checkpoint": {"every_minutes": 0},
    }  # fmt: skip
    return parse_recipe("test", tables(**recipe | changes))


@pytest.fixture(scope="module")
def runs(image_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mild")
    run(2, _train_all, image_dir, folder, fresh=True)
    return folder


def _train_all(images: Path, folder: Path) -> None:
    def train(name: str, recipe: Recipe, resume: bool = False) -> None:
        outcome = train_here(Job("mild", recipe, split_batch(recipe, 2), images, folder / name, resume=resume))
        assert outcome.status == "finished"
        assert outcome.top1_mirror is not None
        assert outcome.top1_shift is not None

    train("ddp", mild("ddp"))
    train("whole", mild("hybrid"))
    train("resumed", mild("hybrid", epochs=1))
    train("resumed", mild("hybrid"), resume=True)


@ci
def test_a_resumed_run_learns_what_ddp_does(runs: Path):
    ddp, whole, resumed = (load_file(runs / name / FINAL_WEIGHTS) for name in ("ddp", "whole", "resumed"))
    assert all(torch.equal(weight, whole[name]) for name, weight in resumed.items()), "to the bit as an unbroken one"
    assert_alike(whole, ddp)


def assert_alike(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4, msg=message)


@ci
def test_averaged_accuracies_are_reported_beside_the_plain_one(runs: Path, image_dir: Path):
    past = read_run(runs / "whole")
    assert past.outcome is not None
    assert {"top-1 %", "mirror %", "shift %"} <= {str(column.header) for column in report_table([past]).columns}
    evaluation = Evaluation("mild", mild("hybrid"), Batching(1, 8, 1), runs / "whole", image_dir)
    (verdict,) = run(1, _judged, evaluation)
    for value in ("top1", "top1_mirror", "top1_shift", "top5_shift"):
        assert getattr(verdict, value) == getattr(past.outcome, value)


def _judged(evaluation: Evaluation) -> EvalResult:
    return judge(evaluation, tests.world())


@pytest.mark.parametrize("shift", [{}, {"top1_shift": 69.0, "top5_shift": 90.0}], ids=["mirrored", "shifted"])
def test_a_target_is_for_the_accuracy_of_the_most_views(shift: dict[str, float]):
    outcome = RunResult("failed", "r", "lazy", 1, 8, target_top1=70.0, target_mirrored=True)
    outcome.judge(75.0, 90.0, 10.0, top1_mirror=71.0 if shift else 69.0, top5_mirror=90.0, **shift)
    assert outcome.status == "failed"
    better = dict.fromkeys(shift, 90.0)
    outcome.judge(69.0, 90.0, 20.0, top1_mirror=69.0 if shift else 70.5, top5_mirror=90.0, **better)
    assert (outcome.status, outcome.time_to_accuracy_s) == ("reached", 20.0)


def test_a_resumed_run_is_judged_by_what_its_recipe_measures_now(tmp_path: Path):
    """The checkpoint's accuracy with shifts is of no use once eval_shift is off."""
    run(1, _train_then_measure_less, tmp_path)
    evaluations, outcome = events_of(tmp_path, "eval"), outcome_of(tmp_path)
    assert [event.get("top1_shift") is None for event in evaluations] == [False, True]
    assert (outcome["status"], outcome["top1_shift"]) == ("reached", None)
    assert outcome["top1_mirror"] == evaluations[1]["top1_mirror"]


def _train_then_measure_less(folder: Path) -> None:
    for epochs, shift, target in ((1, 1, 100), (2, 0, 1)):
        recipe = parse_recipe(
            "test",
            tables(
                ranks=1, epochs=epochs, eval_mirror=True, eval_shift=shift, target_mirrored=True, target_top1=target,
                model={"kind": "cifarnet", "widths": [4, 4, 4]}, data__train_images=16, data__val_images=70,
            ),
        )  # fmt: skip
        train_here(Job("test", recipe, split_batch(recipe, 1), None, folder, resume=epochs == 2))


@ci
def test_weights_are_exported_under_torchvisions_names(runs: Path, tmp_path: Path):
    exported = load_file(export_weights(runs / "whole", None, "safetensors", tmp_path / "weights.safetensors"))
    assert exported.keys() == resnet18(num_classes=3).state_dict().keys()


@ci
def test_pipelines_blur_and_decay_as_one_rank_does():
    changes = {"loss": "bce", "optim": OPTIM, "sync": {"kind": "hybrid", "wire": "fp32"}}
    (one,) = run(1, _piped, Parallel(), changes, fresh=True)
    two, _ = run(2, _piped, Parallel(pipeline=2, micro_batches=2), changes, fresh=True)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    assert_alike(one.weights, two.weights)


def _piped(parallel: Parallel, changes: dict[str, Any]) -> Any:
    whole = small.small_model("resnet18")
    add_blurpool(whole, "conv_maxpool")
    with patch.object(small, "small_model", lambda kind: whole):
        return small.train("resnet18", 2, 0.02, parallel, global_batch=4, **changes)
