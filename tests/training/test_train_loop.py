"""The loop's options that no recipe of the other tests turns on."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from imagenet_fast.distributed.init import DistContext
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from tests.conftest import tables
from tests.spawning import run
from tests.training.jobs import train_job


def test_the_moving_average_is_what_is_saved(tmp_path: Path):
    run(1, _train_with_and_without, tmp_path)
    first, second, averaged = (load_file(tmp_path / name / "checkpoints/final.safetensors") for name in "abc")
    for name, weight in averaged.items():
        if weight.is_floating_point():
            expected = 0.75 * first[name] + 0.25 * second[name]  # it starts from the weights after the first step
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def _train_with_and_without(folder: Path) -> None:
    world = DistContext(0, 1, 0, 1, torch.device("cpu"))
    for name, epochs, decay in (("a", 1, 0.0), ("b", 2, 0.0), ("c", 2, 0.75)):
        recipe = parse_recipe(
            "test",
            tables(
                ranks=1, epochs=epochs, ema_decay=decay, data__train_images=16,  # one step an epoch
                schedule={"kind": "step", "milestones": []},
            ),
        )  # fmt: skip
        job = Job("test", recipe, split_batch(recipe, 1), None, folder / name)
        outcome = train_job(job, world)
        assert (outcome.status, outcome.steps) == ("finished", epochs)
