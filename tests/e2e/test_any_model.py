"""Networks from elsewhere, trained by every engine as under DDP, resumed, evaluated, exported, cut into stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import tests
from imagenet_fast.errors import UserError
from imagenet_fast.launch.evaluate import judge
from imagenet_fast.launch.export import export_weights
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.metrics.run_result import read_outcome
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.job import Evaluation, Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.ranks import run

MODELS: dict[str, dict[str, Any]] = {
    "torchvision": {"name": "shufflenet_v2_x0_5"},
    "timm": {"name": "test_vit", "options": {"img_size": 32, "drop_path_rate": 0.1}},
    "python": {"name": "tests.models.own:build", "options": {"dropout": 0.2}},
}
ENGINES = ("ddp", "lazy", "hybrid", "dear", "auto")


def recipe_of(kind: str, engine: str, epochs: int = 2, **changes: Any) -> Recipe:
    model = {"kind": kind, **MODELS[kind]}
    data = {"loader": "synthetic", "image_size": 32, "classes": 6, "train_images": 32, "val_images": 9}
    sync = {"kind": engine, "wire": "fp32"}
    schedule = {"kind": "step", "milestones": []}
    saving = {"every_minutes": 0}
    return parse_recipe(
        "test",
        tables(model=model, data=data, sync=sync, schedule=schedule, epochs=epochs, checkpoint=saving, **changes),
    )


def job_of(kind: str, engine: str, folder: Path, epochs: int = 2, resume: bool = False) -> Job:
    recipe = recipe_of(kind, engine, epochs)
    return Job("any", recipe, split_batch(recipe, 2), None, folder, resume=resume)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any")
    run(2, _train_all, folder)
    return folder


def _train_all(folder: Path) -> None:
    world = tests.world(dist.get_rank(), 2)
    for kind in MODELS:
        for engine in ENGINES:
            Trainer(job_of(kind, engine, folder / kind / engine), world).run()
        for epochs in (1, 2):
            Trainer(job_of(kind, "hybrid", folder / kind / "resumed", epochs, resume=epochs == 2), world).run()


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_file(run / FINAL_WEIGHTS)


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("kind", MODELS)
def test_every_engine_learns_what_ddp_does(runs: Path, kind: str, engine: str):
    """Dropout and stochastic depth included: their random numbers are a function of the step."""
    expected = weights_of(runs / kind / "ddp")
    for name, weight in weights_of(runs / kind / engine).items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_run_is_an_uninterrupted_one_to_the_bit(runs: Path, kind: str):
    expected = weights_of(runs / kind / "hybrid")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(runs / kind / "resumed").items())


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_evaluated_and_exported(runs: Path, kind: str, tmp_path: Path):
    folder = runs / kind / "dear"
    exported = export_weights(folder, None, "safetensors", tmp_path / "weights.safetensors")
    outcome = read_outcome(folder)
    assert outcome is not None
    (verdict,) = run(1, _judged, Evaluation("any", recipe_of(kind, "dear"), Batching(1, 8, 1), exported, None))
    assert (verdict.top1, verdict.model) == (outcome.top1, MODELS[kind]["name"])


def _judged(evaluation: Evaluation) -> Any:
    return judge(evaluation, tests.world(0, 1))


def test_a_pipeline_cuts_what_it_knows_and_refuses_the_rest_in_a_sentence(tmp_path: Path):
    cut, refused = run(2, _piped, tmp_path)[0]
    assert cut == "finished"
    assert refused.startswith("in which order VisionTransformer calls its layers is not known")
    assert "\n" not in refused


def _piped(folder: Path) -> tuple[str, str]:
    world = tests.world(dist.get_rank(), 2)
    layout = {"pipeline": 2, "micro_batches": 2}
    recipe = recipe_of("timm", "lazy", parallel=layout)
    model = {"kind": "torchvision", "name": "resnet18", "blurpool": "conv_maxpool"}
    known = parse_recipe(
        "test", tables(model=model, parallel=layout, epochs=1, data__train_images=16, checkpoint={"every_minutes": 0})
    )
    outcome = Trainer(Job("known", known, split_batch(known, 2), None, folder / "known"), world).run()
    trainer = Trainer(Job("any", recipe, split_batch(recipe, 2), None, folder / "any"), world)
    trainer.open_data()
    try:
        trainer.build()
    except UserError as error:
        return outcome.status, str(error)
    return outcome.status, ""
