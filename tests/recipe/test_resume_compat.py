"""The recipes that a run may resume with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, differences, recipe_tables, write_job
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_recipe, to_toml
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.job_setup import recipe_to_train
from tests.conftest import tables

DATA = {"dataset": "digits", "loader": "folder", "image_size": 48, "resize": 56}
LARS = {"kind": "lars", "lr": 1, "weight_decay": 0}


def recipe(**changes: Any) -> Recipe:
    return parse_recipe("test", tables(**{"data": dict(DATA), "optim": dict(LARS)} | changes))


def test_differences_name_keys_that_may_not_change():
    begun = recipe_tables(recipe(epochs=3))
    other = recipe(data=DATA | {"workers": 7, "flip": False}, epochs=9)
    assert differences(begun, other) == ["data.flip (true, now false)"]


def test_a_key_that_an_earlier_version_did_not_have_had_its_default_then():
    for key, value, told in (
        ("data__mixup", 0.2, ["data.mixup (0.0, now 0.2)"]),
        ("model__blurpool", "conv", ['model.blurpool ("off", now "conv")']),
        ("optim__biases", "scaled", ['optim.biases ("plain", now "scaled")']),
        ("loss", "bce", ['loss ("cross_entropy", now "bce")']),
        ("eval_mirror", True, []),  # evaluations may change where a run goes on
    ):
        begun, (*tables_of, name) = recipe_tables(recipe()), key.split("__")
        del (begun[tables_of[0]] if tables_of else begun)[name]
        assert differences(begun, recipe()) == []
        assert differences(begun, recipe(**{key: value})) == told


def test_a_run_goes_on_by_its_own_recipe_though_the_shipped_one_has_changed(tmp_path: Path):
    own = load_recipe(find_recipe("alexnet-8gpu"), overrides=["optim.biases=plain"])
    write_job(Job("alexnet-8gpu", own, split_batch(own, 8), None, tmp_path), tmp_path / "job.json")
    (tmp_path / "recipe.toml").write_text(to_toml(own))
    assert recipe_to_train(None, tmp_path, None, (), None) == ("alexnet-8gpu", own, None)


def test_tables_that_are_no_recipe_are_compared_as_they_are():
    assert differences(recipe_tables(recipe()) | {"seed": "one"}, recipe()) == ['seed ("one", now 1)']
