"""What the first tier meets, counted against the schema: a kind that is new there fails here."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from imagenet_fast.models import build_model
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Model
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.recipe.sync_table import Collective, Wire
from tests.conftest import tables
from tests.sync.test_contract import FIRST_TIER

EXTERNAL = {"torchvision": "resnet18", "timm": "resnet10t", "python": "tests.models.own:build"}
"""A network for each kind that needs its name."""


def kinds(union: object) -> list[str]:
    """The kinds of a tagged union of the schema."""
    return [kind for table in get_args(get_args(union)[0]) for kind in get_args(table.model_fields["kind"].annotation)]


def wires() -> set[str]:
    return {wire for part in get_args(Wire) for wire in (get_args(part) or (part,))}


def test_every_engine_wire_and_collective_is_in_the_contract():
    engines, sent, collectives = map(set, zip(*FIRST_TIER, strict=True))
    assert engines >= set(kinds(Sync))
    assert sent >= wires()
    assert collectives >= set(get_args(Collective))


@pytest.mark.parametrize("kind", kinds(Model))
def test_every_kind_of_model_is_built(kind: str):
    named = {"name": EXTERNAL[kind]} if kind in EXTERNAL else {}
    recipe = parse_recipe("test", tables(model={"kind": kind, **named}, data__image_size=67))
    with torch.device("meta"):
        assert build_model(recipe.model, classes=3)(torch.randn(2, 3, 67, 67)).shape == (2, 3)
