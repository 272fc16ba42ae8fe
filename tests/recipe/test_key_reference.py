"""Every key of the schema is in the reference, with its type, default and a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from imagenet_fast.recipe.key_reference import Key, recipe_keys
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import refusal_of


def paths(schema: dict[str, Any], definitions: dict[str, Any], name: str = "") -> Iterator[str]:
    """Keys of a JSON schema, dotted."""
    if reference := schema.get("$ref"):
        yield from paths(definitions[reference.rpartition("/")[2]], definitions, name)
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from paths(inner, definitions, name)
    for key, inner in schema.get("properties", {}).items():
        below = list(paths(inner, definitions, f"{name}{key}."))
        yield from below or [f"{name}{key}"]


def one(name: str) -> Key:
    (key,) = (key for key in recipe_keys(name) if key.name == name)
    return key


def test_every_key_of_the_schema_is_listed_with_a_meaning():
    schema = Recipe.model_json_schema()
    assert {key.name for key in recipe_keys()} == set(paths(schema, schema["$defs"]))
    for key in recipe_keys():
        assert key.meaning.endswith((".", ".)")), key
        assert "Pydantic" not in key.default, key
        assert "``" not in key.meaning, key


def test_types_ranges_and_defaults_are_those_of_the_schema():
    assert one("optim.lr") == Key(
        "optim.lr", (), "number > 0", "required", "Peak learning rate, at the end of the warm-up; above 0."
    )
    assert (one("seed").type, one("seed").default) == ("integer ≥ 0, < 2147483648", "1")
    assert (one("target_top1").type, one("target_top1").default) == ("number > 0, ≤ 100", "absent")
    assert one("data.sizes").type == "list of [number > 0, integer > 0]"
    assert one("sync.sparsity").kinds == ("sparse",)
    assert one("sync.fuse_mb").type == 'number ≥ 0 or "auto"'
    assert one("optim.kind").type == '"sgd", "lars"'
    assert {one(key).default for key in ("sync.kind", "optim.kind", "data.loader")} == {"required"}
    wires = {(key.kinds, key.default) for key in recipe_keys("sync.wire")}
    assert (("allreduce",), '"fp32"') in wires
    assert (("ring", "lazy", "hybrid", "dear", "auto"), '"bf16"') in wires


def test_what_chooses_the_other_keys_stands_first_in_its_table():
    names = list(dict.fromkeys(key.name for key in recipe_keys()))
    assert names[0] == "ranks"
    assert names.index("sync.kind") < names.index("sync.wire")
    assert names.index("data.loader") < names.index("data.image_size")


def test_an_unknown_key_is_refused_with_the_nearest():
    assert "no recipe key begins with 'optin.lr'; did you mean optim.lr" in refusal_of(recipe_keys, "optin.lr")
    assert "`imagenet-fast recipes keys` lists all" in refusal_of(recipe_keys, "§")
