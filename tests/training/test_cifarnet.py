"""A network with frozen layers, one of them made from training images."""

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
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.data_config import ImageData, SyntheticData
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.parallel.small import small_model, train
from tests.ranks import run

FROZEN = ["whiten.weight", *(f"group{g}.norm{n}.weight" for g in (1, 2, 3) for n in (1, 2))]
SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.85, "nesterov": True, "weight_decay": 1e-3, "norm_bias_factor": 8.0}
ENGINES: dict[str, dict[str, Any]] = {
    "lazy": {"threshold_mb": 0.001}, "hybrid": {}, "dear": {}, "auto": {}, "ddp": {}, "ring": {},
    "sparse": {"sparsity": 0.0, "chunk": 64},
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_trains_it_and_leaves_frozen_layers_alone(kind: str):
    before, expected = small_model("cifarnet").state_dict(), trained(kind="allreduce")
    for key, tensor in trained(kind=kind, **ENGINES[kind]).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4, msg=key)
        assert torch.equal(tensor, before[key]) or key not in FROZEN, key


def trained(**sync: Any) -> dict[str, Tensor]:
    settings = {"global_batch": 16, "micro_batch": 4, "sync": {"wire": "fp32"} | sync, "optim": SGD, "ema_decay": 0.5}
    return run(2, partial(train, "cifarnet", 4, **settings))[0].weights


def recipe_of(**changes: Any) -> Recipe:
    data = {"dataset": "cifar10", "loader": "folder", "image_size": 32, "resize": 32, "workers": 1}
    return parse_recipe("test", tables(model={"kind": "cifarnet", "widths": [4, 5, 6]}, data=data, **changes))


def test_ranks_begin_with_rank_zeros_whitening(image_dir: Path):
    """Only rank 0 reads images for it."""
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
