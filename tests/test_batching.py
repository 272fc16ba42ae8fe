"""The global batch is the recipe's, whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from imagenet_fast.batching import Batching, explain, scale_batch, split_batch
from imagenet_fast.errors import UserError
from imagenet_fast.loading import find_recipe, load_recipe
from imagenet_fast.recipe import Recipe


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(512, (128, 1)), (1, (128, 512)), (8, (128, 64)), (1024, (64, 1)), (65536, (1, 1))],
)
def test_fewer_ranks_accumulate_and_more_ranks_see_less(ranks: int, expected: tuple[int, int]):
    batching = split_batch(load_recipe(find_recipe("alexnet-512gpu")), ranks)
    assert (batching.micro_batch, batching.accumulation) == expected
    assert batching.global_batch == 65536


def test_every_split_keeps_the_global_batch_or_names_one_that_works(make_recipe: Callable[..., Recipe]):
    refused = 0
    for global_batch in (16, 48, 60, 97, 128):
        for ranks in range(1, 20):
            recipe = make_recipe(global_batch=global_batch, ranks=1, micro_batch=8)
            try:
                batching = split_batch(recipe, ranks)
            except UserError as error:
                refused += 1
                proposed = int(str(error).partition("--set global_batch=")[2].partition(",")[0])
                batching = split_batch(make_recipe(global_batch=proposed, ranks=1, micro_batch=8), ranks)
                assert batching.global_batch == proposed
            else:
                assert batching.global_batch == global_batch
            assert batching.micro_batch <= 8
    assert refused


def test_what_does_not_divide_is_told_with_its_neighbours(make_recipe: Callable[..., Recipe]):
    with pytest.raises(UserError, match=r"16 does not divide over 3 ranks .* nearest that do are 15 and 18"):
        split_batch(make_recipe(), 3)
    with pytest.raises(UserError, match=r"17 does not divide over the recipe's 2 ranks; .* 16 and 18"):
        split_batch(make_recipe(global_batch=17), 2)


def test_the_line_about_accumulation():
    recipe = load_recipe(find_recipe("alexnet-512gpu"))
    line = explain(recipe, split_batch(recipe, 1))
    assert line == "recipe written for 512 ranks: 1 rank, micro-batch 128, 512 accumulation steps"


def test_scaling_shrinks_the_batch_and_the_rate_and_says_so():
    sgd = load_recipe(find_recipe("alexnet-1gpu"), overrides=["ranks=4"])
    assert scale_batch(sgd, 2) == Batching(2, 64, 1, lr_factor=0.5)
    assert explain(sgd, scale_batch(sgd, 2)).endswith("batch 256 -> 128, lr 0.01 -> 0.005 (linear scaling)")
    lars = load_recipe(find_recipe("resnet50-8gpu"))
    assert scale_batch(lars, 2).lr_factor == pytest.approx(0.5)
    demo = load_recipe(find_recipe("demo"))
    assert scale_batch(demo, 1) == Batching(1, 16, 2, lr_factor=0.5**0.5)
    assert scale_batch(demo, 2) == split_batch(demo, 2)
    assert explain(lars, scale_batch(lars, 2)).endswith("batch 3200 -> 800, lr 11 -> 5.5 (square-root scaling)")
