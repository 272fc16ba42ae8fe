"""A network with frozen layers, one of them made from training images: under every engine, and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests
from imagenet_fast.data.loaders import example_images
from imagenet_fast.models.cifarnet import whitening_filters
from imagenet_fast.models.weights import read_weights
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.data_config import ImageData, SyntheticData
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.parallel.small import small_model, train
from tests.ranks import run

FROZEN = ["whiten.weight", *(f"group{g}.norm{n}.weight" for g in (1, 2, 3) for n in (1, 2))]
SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.85, "nesterov": True, "weight_decay": 1e-3, "norm_bias_factor": 8.0}
EXACT: dict[str, dict[str, Any]] = {
    "lazy": {"threshold_mb": 0.001}, "ring": {}, "hybrid": {}, "dear": {}, "auto": {}, "ddp": {},
    "sparse": {"sparsity": 0.0, "chunk": 64},
}  # fmt: skip
INEXACT: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "lazy", "wire": "bf16"}, "int8": {"kind": "lazy", "wire": "int8"},
    "fp8": {"kind": "hybrid", "wire": "fp8"}, "powersgd": {"kind": "powersgd", "rank": 2, "dense_epochs": 0.25},
    "sparse-part": {"kind": "sparse", "chunk": 64, "dense_epochs": 0.25},
}  # fmt: skip
ENGINES = {kind: {"kind": kind, "wire": "fp32", **settings} for kind, settings in EXACT.items()} | INEXACT


@pytest.mark.parametrize("name", [pytest.param(e, marks=() if e == "hybrid" else pytest.mark.ci) for e in ENGINES])
def test_every_engine_trains_it_and_leaves_frozen_layers_alone(name: str):
    before, expected = small_model("cifarnet").state_dict(), trained({"kind": "allreduce", "wire": "fp32"})
    for key, tensor in trained(ENGINES[name]).items():
        if key in FROZEN:
            assert torch.equal(tensor, before[key]), key
        elif name in EXACT:
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4, msg=key)
        assert tensor.isfinite().all(), key


def trained(sync: dict[str, Any]) -> dict[str, Tensor]:
    settings = {"global_batch": 16, "micro_batch": 4, "sync": sync, "optim": SGD, "ema_decay": 0.5}
    return run(2, partial(train, "cifarnet", 4, **settings))[0].weights


def recipe_of(**changes: Any) -> Recipe:
    data = {
        "dataset": "cifar10", "loader": "folder", "image_size": 32, "resize": 32, "crop": "padded", "crop_padding": 2,
        "flip": "alternate", "workers": 1,
    }  # fmt: skip
    schedule = {"kind": "polynomial", "power": 1.0, "warmup_epochs": 0.5, "start_lr": 0.02}
    model = {"kind": "cifarnet", "widths": [4, 5, 6]}
    return parse_recipe(
        "test",
        tables(model=model, data=data, optim=SGD, schedule=schedule, epochs=3, ema_decay=0.9, eval_mirror=True)
        | changes,
    )  # fmt: skip


def test_ranks_begin_with_rank_zeros_whitening(image_dir: Path):
    """Only rank 0 reads images for it; a random first layer would differ from the formula."""
    weights = run(3, _initial_weights, image_dir)
    assert all(torch.equal(weights[0][name], tensor) for other in weights for name, tensor in other.items())
    images = list(example_images(recipe_of().data, image_dir, seed=1))
    filters = whitening_filters(images, 2, 5e-4)
    torch.testing.assert_close(weights[0]["whiten.weight"], torch.cat([filters, -filters]))


def _initial_weights(images: Path) -> dict[str, Tensor]:
    world, recipe = tests.world(), recipe_of(global_batch=24)
    trainer = Trainer(Job("test", recipe, split_batch(recipe, world.size), images, Path("unused")), world)
    trainer.open_data()
    trainer.build()
    found = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.state.sync.close()
    return found


@pytest.mark.parametrize("loader", ["dali", "folder"])
def test_examples_are_whole_images_chosen_by_the_seed(image_dir: Path, loader: str):
    data = recipe_of().data
    assert isinstance(data, ImageData)
    same = [torch.cat(list(example_images(data, image_dir, seed))) for seed in (1, 1, 2)]
    assert same[0].shape == (40, 3, 32, 32)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    other = data.model_copy(update={"loader": loader, "flip": True, "crop": "resized", "workers": 2})
    assert torch.equal(torch.cat(list(example_images(other, image_dir, 1))), same[0])


def test_examples_of_synthetic_images_are_some_thousands_at_most():
    data = SyntheticData(loader="synthetic", image_size=8, train_images=10**6, val_images=1, classes=3)
    assert sum(len(images) for images in example_images(data, None, 1)) == 5000


def test_without_examples_the_first_layer_follows_from_the_seed():
    first, second = run(2, _filters_twice)[0]
    assert torch.equal(first, second)


def _filters_twice() -> list[Tensor]:
    models = [build_initial_model(recipe_of(), 10, tests.world()) for _ in range(2)]
    return [model.get_parameter("whiten.weight").detach() for model in models]


@pytest.mark.ci
def test_a_resumed_run_ends_with_the_same_bits(image_dir: Path, tmp_path: Path):
    """The same whitening, crops, flips and rates, though the second part begins amid an epoch."""
    straight = run(2, _trained, image_dir, tmp_path / "straight", None, fresh=True)[0]
    run(2, _trained, image_dir, tmp_path / "parts", 3, fresh=True)
    resumed = run(2, _trained, image_dir, tmp_path / "parts", None, fresh=True)[0]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], tensor) for name, tensor in resumed.items())
    final = read_weights(tmp_path / "parts" / "checkpoints" / "final.safetensors").tensors
    assert torch.equal(final["whiten.weight"], straight["whiten.weight"])


def _trained(images: Path, folder: Path, stop: int | None) -> dict[str, Tensor]:
    world, recipe, steps = tests.world(), recipe_of(), iter(range(10**6))
    job = Job("test", recipe, split_batch(recipe, world.size), images, folder, resume=True)
    trainer = Trainer(job, world, ask_first=None if stop is None else (lambda: lambda: next(steps) >= stop))
    assert trainer.run().status == ("finished" if stop is None else "preempted")
    return {name: tensor.clone() for name, tensor in trainer.state.judged.state_dict().items()}
