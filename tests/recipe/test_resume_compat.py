"""The recipes that a run may resume with."""

from __future__ import annotations

import re
from pathlib import Path

from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, differences, read_job, recipe_tables, write_job
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_recipe, to_toml
from imagenet_fast.recipe.optim_config import Lars
from imagenet_fast.training.job_setup import recipe_to_train
from tests.conftest import tables

DATA = {"dataset": "digits", "loader": "folder", "image_size": 48, "resize": 56}


def test_differences_name_keys_that_may_not_change():
    begun = parse_recipe("test", tables(data=DATA, epochs=3))
    other = parse_recipe("test", tables(data=DATA | {"workers": 7, "flip": False}, epochs=9))
    assert differences(recipe_tables(begun), other) == ["data.flip (true, now false)"]


def test_a_key_that_an_earlier_version_did_not_have_had_its_default_then():
    recipe = parse_recipe("test", tables(data=DATA))
    begun = recipe_tables(recipe)
    del begun["data"]["crop"], begun["data"]["mixup"]
    assert differences(begun, recipe) == []
    mixed = parse_recipe("test", tables(data=DATA | {"mixup": 0.2}))
    assert differences(begun, mixed) == ["data.mixup (0.0, now 0.2)"]


def test_a_run_from_before_biases_could_be_scaled_goes_on_with_plain_ones(tmp_path: Path):
    """By its own recipe. The shipped one, which scales them now, is refused with the key."""
    overrides = ("ranks=8", "data={loader='synthetic', image_size=227, classes=10, train_images=8192, val_images=1}")
    shipped = load_recipe(find_recipe("alexnet-8gpu"), overrides=overrides)
    write_job(Job("alexnet-8gpu", shipped, split_batch(shipped, 8), None, tmp_path), tmp_path / "job.json")
    (tmp_path / "recipe.toml").write_text(to_toml(shipped))
    for path, line in (
        (tmp_path / "job.json", r',\s+"biases": "scaled"'),
        (tmp_path / "recipe.toml", r'biases = "scaled"\n'),
    ):
        text, found = re.subn(line, "", path.read_text())
        assert found == 1
        path.write_text(text)
    begun = read_job(tmp_path / "job.json", Job).recipe
    _, resumed, _ = recipe_to_train(None, tmp_path, None, (), None)
    for recipe in (begun, resumed):
        assert isinstance(recipe.optim, Lars)
        assert recipe.optim.biases == "plain"
    tables_then = recipe_tables(begun)
    del tables_then["optim"]["biases"]
    assert differences(tables_then, resumed) == []
    assert differences(tables_then, shipped) == ['optim.biases ("plain", now "scaled")']


def test_keys_of_the_fast_recipes_were_at_their_defaults_before():
    recipe = parse_recipe("test", tables(data=DATA, schedule={"kind": "polynomial", "warmup_epochs": 1}))
    begun = recipe_tables(recipe)
    for key in ("loss", "eval_mirror", "eval_shift", "target_mirrored"):
        del begun[key]
    del begun["model"]["blurpool"], begun["model"]["init"], begun["data"]["size_multiple"]
    del begun["optim"]["decay_all"], begun["optim"]["decoupled"]
    del begun["schedule"]["warmup_power"], begun["schedule"]["decay_from"]
    assert differences(begun, recipe) == []
    mirrored = parse_recipe("test", tables(data=DATA, schedule=begun["schedule"], eval_mirror=True, eval_shift=1))
    assert differences(begun, mirrored) == [], "evaluations may change where a run goes on"
    blurred = parse_recipe("test", tables(data=DATA, schedule=begun["schedule"], model__blurpool="conv"))
    assert differences(begun, blurred) == ['model.blurpool ("off", now "conv")']


def test_tables_that_are_no_recipe_are_compared_as_they_are():
    recipe = parse_recipe("test", tables(data=DATA))
    begun = recipe_tables(recipe) | {"seed": "one"}
    assert differences(begun, recipe) == [f'seed ("one", now {recipe.seed})']
