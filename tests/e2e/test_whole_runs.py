"""Whole runs: whatever a recipe asks for, by whichever engine and on however many ranks, they learn the same."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchvision.models import resnet18

import tests
from imagenet_fast.cli.export import export
from imagenet_fast.compare.report import summaries
from imagenet_fast.metrics.past_run import read_run
from imagenet_fast.metrics.tables import table
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.run.result import Accuracy, RunResult
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.evaluation import EvalResult, evaluate_weights
from tests.e2e.command import events_of, outcome_of, train_here
from tests.ranks import run, with_ranks
from tests.training.jobs import job_of

OPTIM = {
    "kind": "sgd", "lr": 0.05, "momentum": 0.875, "weight_decay": 5e-3, "decay_all": True, "decoupled": True
}  # fmt: skip
MILD = {
    "loss": "bce", "label_smoothing": 0.08, "ema_decay": 0.5, "eval_mirror": True, "eval_shift": 1, "optim": OPTIM,
    "model": {
        "kind": "resnet18", "blurpool": "conv_maxpool",
        "init": ["kaiming_normal", "bn_uniform", "linear_log_constant_bias"],
    },
    "data": {
        "dataset": "digits", "loader": "threads", "image_size": 40, "resize": 48, "eval_size": 48, "workers": 1,
        "sizes": [[1, 32], [3, 40]], "size_multiple": 4, "flip": "alternate",
    },
}  # fmt: skip
"""What the fastest single-node recipes need, all together."""
ELSEWHERE: list[dict[str, Any]] = [
    {"kind": "torchvision", "name": "shufflenet_v2_x0_5"},
    {"kind": "timm", "name": "test_vit", "options": {"img_size": 32, "drop_path_rate": 0.1}},
    {"kind": "python", "name": "tests.models.own:build", "options": {"dropout": 0.2}},
]
"""Networks from elsewhere, with dropout and stochastic depth: their random numbers are a function of the step."""
SYNTHETIC = {"loader": "synthetic", "image_size": 32, "classes": 6, "train_images": 32, "val_images": 9}
CASES = [
    pytest.param(MILD, "hybrid", marks=pytest.mark.ci, id="mild"),
    *(
        pytest.param(
            {"model": model, "data": SYNTHETIC}, engine, marks=pytest.mark.weekly, id=f"{model['kind']}-{engine}"
        )
        for model, engine in product(ELSEWHERE, ("lazy", "hybrid", "dear", "auto"))
    ),
]


def settings(changes: dict[str, Any], engine: str) -> dict[str, Any]:
    one_rate, at_the_end = {"kind": "step", "milestones": []}, {"every_minutes": 0}
    return changes | {"sync": {"kind": engine, "wire": "fp32"}, "schedule": one_rate, "checkpoint": at_the_end}


@pytest.mark.parametrize(("changes", "engine"), CASES)
def test_a_resumed_run_learns_what_ddp_does(changes: dict[str, Any], engine: str, image_dir: Path, tmp_path: Path):
    images = image_dir if changes is MILD else None
    run(2, _train_all, changes, engine, images, tmp_path, fresh=True)
    ddp, whole, resumed = (load_file(RunDir(tmp_path / name).final_weights) for name in ("ddp", "whole", "resumed"))
    for name, weight in whole.items():
        torch.testing.assert_close(weight, ddp[name], rtol=1e-3, atol=1e-4, msg=partial("{}: {}".format, name))
    assert engine == "auto" or all(torch.equal(weight, whole[name]) for name, weight in resumed.items()), "to the bit"

    exported = tmp_path / "weights.safetensors"
    export(tmp_path / "whole", exported)
    evaluation = Evaluation("any", job_of(**settings(changes, engine)).recipe, Batching(1, 8, 1), exported, images)
    ((verdict,), past) = run(1, _judged, evaluation), read_run(tmp_path / "whole")
    for value in ("top1", "top1_mirror", "top1_shift", "top5_shift"):
        assert getattr(verdict, value) == past.last(value, "eval")
    assert verdict.model == changes["model"].get("name", "resnet18")
    if changes is MILD:
        assert {"top-1 %", "mirror %", "shift %"} <= {str(column.header) for column in table(summaries([past])).columns}
        assert load_file(exported).keys() == resnet18(num_classes=3).state_dict().keys(), "under torchvision's names"


def _train_all(changes: dict[str, Any], engine: str, images: Path | None, folder: Path) -> None:
    for name, kind, epochs in (("ddp", "ddp", 2), ("whole", engine, 2), ("resumed", engine, 1), ("resumed", engine, 2)):
        job = job_of(folder / name, images, resume=True, epochs=epochs, **settings(changes, kind))
        assert train_here(job).status == "finished"


def _judged(evaluation: Evaluation) -> EvalResult:
    return evaluate_weights(evaluation, tests.world())


@pytest.mark.parametrize("shift", [{}, {"top1_shift": 69.0, "top5_shift": 90.0}], ids=["mirrored", "shifted"])
def test_a_target_is_for_the_accuracy_of_the_most_views(shift: dict[str, float]):
    outcome = RunResult("failed", "r", "lazy", 1, 8, target_top1=70.0, target_mirrored=True)
    outcome.record_eval(Accuracy(top1=75.0, top1_mirror=71.0 if shift else 69.0, **shift), 10.0)
    assert outcome.status == "failed"
    better = dict.fromkeys(shift, 90.0)
    outcome.record_eval(Accuracy(top1=69.0, top1_mirror=69.0 if shift else 70.5, **better), 20.0)
    assert (outcome.status, outcome.time_to_accuracy_s) == ("reached", 20.0)


@with_ranks(1)
def test_a_resumed_run_is_judged_by_what_its_recipe_measures_now(tmp_path: Path):
    """The checkpoint's accuracy with shifts is of no use once eval_shift is off."""
    small = {"reference_ranks": 1, "eval_mirror": True, "target_mirrored": True}
    small |= {"data__train_images": 16, "data__val_images": 30}
    for epochs, shift, target in ((1, 1, 100), (2, 0, 1)):
        train_here(job_of(tmp_path, resume=epochs == 2, epochs=epochs, eval_shift=shift, target_top1=target, **small))
    evaluations, outcome = events_of(tmp_path, "eval"), outcome_of(tmp_path)
    assert [event.get("top1_shift") is None for event in evaluations] == [False, True]
    assert (outcome["status"], outcome["top1_shift"]) == ("reached", None)
    assert outcome["top1_mirror"] == evaluations[1]["top1_mirror"]
