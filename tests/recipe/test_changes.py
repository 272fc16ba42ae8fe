"""Which recipes a run may go on by."""

from __future__ import annotations

from imagenet_fast.recipe.changes import differences
from imagenet_fast.recipe.job import recipe_tables
from imagenet_fast.recipe.reading import parse_recipe
from tests.conftest import tables

DATA = {"dataset": "digits", "loader": "folder", "image_size": 48, "resize": 56}


def test_what_may_change_makes_no_difference_and_what_may_not_is_told_with_both_values():
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


def test_tables_that_are_no_recipe_are_compared_as_they_are():
    recipe = parse_recipe("test", tables(data=DATA))
    begun = recipe_tables(recipe) | {"seed": "one"}
    assert differences(begun, recipe) == [f'seed ("one", now {recipe.seed})']
