"""Layouts: which divide over the ranks there are, and what is said of those that do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import explain, split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.validation import check_axes
from tests.conftest import refusal_of, tables


def laid(global_batch: int = 64, **parallel: Any) -> Recipe:
    """An AlexNet's recipe with a layout; ``global_batch`` is the other thing that decides."""
    model = {"model": {"kind": "alexnet"}, "data__image_size": 63}
    return parse_recipe("test", tables(**model, global_batch=global_batch, parallel=parallel))


def test_without_the_table_all_ranks_are_data_parallel(make_recipe: Callable[..., Recipe]):
    assert make_recipe().parallel == Parallel()
    for ranks in (1, 2, 7, 512):
        check_axes(make_recipe(), ranks)
    assert "parallel" not in explain(make_recipe(), make_recipe(), split_batch(make_recipe(), 2))


def test_a_layout_has_a_name():
    for parallel, ranks, name in (
        ({}, 1, "dp1"), ({}, 8, "dp8"), ({"tensor": 4}, 4, "tp4"), ({"tensor": 4}, 8, "dp2tp4"),
        ({"pipeline": 2, "micro_batches": 4}, 4, "pp2dp2"),
        ({"tensor": 2, "pipeline": 2, "micro_batches": 4}, 8, "pp2dp2tp2"),
    ):  # fmt: skip
        assert Parallel(**parallel).layout(ranks) == name


def test_uneven_layout_is_refused_with_the_nearest():
    for parallel, ranks, sentence in (
        ({"tensor": 2}, 1, "parallel.tensor 2 needs a multiple of 2 ranks, and there is 1; give --set parallel."),
        ({"tensor": 2}, 3, "a multiple of 2 ranks, and there are 3; give --set parallel.tensor=1, or choose another"),
        ({"tensor": 4}, 6, "give --set parallel.tensor=2 or --set parallel.tensor=1, or choose another --nproc"),
        ({"tensor": 16}, 8, "give --set parallel.tensor=8 or --set parallel.tensor=4, or"),
        ({"pipeline": 4, "micro_batches": 4}, 6, "give --set parallel.pipeline=3 or --set parallel.pipeline=2, or"),
        (
            {"tensor": 2, "pipeline": 2, "schedule": "gpipe"}, 6,
            "parallel.tensor 2 x parallel.pipeline 2 needs a multiple of 4 ranks, and there are 6; "
            "give --set parallel.tensor=1 --set parallel.pipeline=2 or --set parallel.tensor=2 --set ",
        ),
        (
            {"pipeline": 2, "micro_batches": 3}, 4,
            "global_batch 64 does not divide over the 2 ranks of a stage in 3 equal micro-batches each; "
            "give --set global_batch=60, or choose another parallel.micro_batches",
        ),
        ({"pipeline": 2, "micro_batches": 100}, 4, "give --set global_batch=200, or"),
    ):  # fmt: skip
        told = refusal_of(check_axes, laid(**parallel), ranks)
        assert sentence in told
        assert "\n" not in told


def test_a_batch_is_read_by_what_is_left_of_the_ranks_or_a_whole_pipeline():
    for parallel, micro_batch, ranks, expected, line in (
        # A pipeline reads what its ranks would have read together.
        ({"pipeline": 2, "micro_batches": 4}, 0, 2, (1, 64, 1), "2 ranks, micro-batch 16, 1 accumulation step; "),
        ({"pipeline": 2, "micro_batches": 4}, 0, 4, (2, 32, 1), "x 2; 4 micro-batches under way by 1f1b"),
        # As many images at a time as the recipe has it, and as many times as they need.
        ({"pipeline": 2, "micro_batches": 4}, 8, 2, (1, 32, 2), "micro-batch 8, 2 accumulation steps; "),
        ({"pipeline": 2, "schedule": "gpipe"}, 64, 2, (1, 64, 1), "; 1 micro-batch under way by gpipe"),
        ({"tensor": 2, "pipeline": 2, "micro_batches": 4}, 2, 8, (4, 8, 2), "data-parallel x 2; 4 micro-batches"),
        # Data parallelism is what is left of the ranks.
        ({"tensor": 2}, 0, 2, (2, 32, 1), ", data-parallel x 1"),
        ({"tensor": 4}, 0, 64, (64, 1, 1), ", data-parallel x 16"),
        ({"pipeline": 4, "micro_batches": 4}, 0, 8, (2, 32, 1), ", data-parallel x 2; 4"),
    ):
        recipe = laid(**parallel).model_copy(update={"micro_batch": micro_batch, "ranks": ranks})
        check_axes(recipe, ranks)
        batching = split_batch(recipe, ranks)
        assert (batching.readers, batching.micro_batch, batching.accumulation) == expected
        assert batching.global_batch == 64
        assert line in explain(recipe, recipe, batching)


def test_what_is_proposed_comes_out_even():
    for ranks, tensor, pipeline in product(range(1, 25), (2, 4, 8), (1, 2, 3)):
        schedule = "gpipe" if pipeline > 1 else "1f1b"
        asked: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "schedule": schedule}
        try:
            check_axes(laid(global_batch=24 * ranks, **asked), ranks)
        except UserError as error:
            first = str(error).partition("give ")[2].partition(" or ")[0]
            asked |= {axis: int(size) for axis, size in re.findall(r"--set parallel\.(\w+)=(\d+)", first)}
            asked |= {"schedule": "1f1b"} if asked["pipeline"] == 1 else {}
            check_axes(laid(global_batch=24 * ranks, **asked), ranks)
        else:
            assert ranks % (tensor * pipeline) == 0
