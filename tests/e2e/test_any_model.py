"""Networks from elsewhere, trained by every engine as under DDP, resumed, evaluated, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tests
from imagenet_fast.launch.evaluate import judge
from imagenet_fast.launch.export import export_weights
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.job import Evaluation, Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import tables
from tests.e2e.command import outcome_of, train_here
from tests.ranks import run

MODELS: dict[str, dict[str, Any]] = {
    "torchvision": {"name": "shufflenet_v2_x0_5"},
    "timm": {"name": "test_vit", "options": {"img_size": 32, "drop_path_rate": 0.1}},
    "python": {"name": "tests.models.own:build", "options": {"dropout": 0.2}},
}
DATA = {"loader": "synthetic", "image_size": 32, "classes": 6, "train_images": 32, "val_images": 9}


def recipe_of(model: dict[str, Any], engine: str = "lazy", epochs: int = 2, **changes: Any) -> Recipe:
    sync, schedule, saving = {"kind": engine, "wire": "fp32"}, {"kind": "step", "milestones": []}, {"every_minutes": 0}
    common = {"data": DATA, "sync": sync, "schedule": schedule, "checkpoint": saving}
    return parse_recipe("test", tables(model=model, epochs=epochs, **common, **changes))


def train(recipe: Recipe, folder: Path, resume: bool = False) -> str:
    return train_here(Job("any", recipe, split_batch(recipe, 2), None, folder, resume=resume)).status


@pytest.mark.weekly
@pytest.mark.parametrize("engine", ["lazy", "hybrid", "dear", "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_run_of_every_engine_learns_what_ddp_does_and_is_exported(kind: str, engine: str, tmp_path: Path):
    """Dropout and stochastic depth included: their random numbers are a function of the step."""
    run(2, _train_all, kind, engine, tmp_path, fresh=True)
    ddp, whole, resumed = (load_file(tmp_path / name / FINAL_WEIGHTS) for name in ("ddp", "whole", "resumed"))
    for name, weight in whole.items():
        torch.testing.assert_close(weight, ddp[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(weight, resumed[name]) or engine == "auto", "which may choose otherwise"
    exported = export_weights(tmp_path / "whole", None, "safetensors", tmp_path / "weights.safetensors")
    evaluation = Evaluation("any", recipe_of({"kind": kind} | MODELS[kind]), Batching(1, 8, 1), exported, None)
    assert run(1, _judged, evaluation) == [(outcome_of(tmp_path / "whole")["top1"], MODELS[kind]["name"])]


def _train_all(kind: str, engine: str, folder: Path) -> None:
    model = {"kind": kind} | MODELS[kind]
    train(recipe_of(model, "ddp"), folder / "ddp")
    train(recipe_of(model, engine), folder / "whole")
    train(recipe_of(model, engine, epochs=1), folder / "resumed")
    train(recipe_of(model, engine), folder / "resumed", resume=True)


def _judged(evaluation: Evaluation) -> tuple[float, str]:
    verdict = judge(evaluation, tests.world())
    return verdict.top1, verdict.model
