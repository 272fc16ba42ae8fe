"""The global batch is the recipe's, whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import check_splits, explain, scale_recipe, split_batch
from imagenet_fast.recipe.reading import find_recipe, load_recipe
from imagenet_fast.recipe.schema import Recipe


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


def test_a_range_of_nodes_is_refused_with_those_that_split_it_and_a_batch_that_all_do(
    make_recipe: Callable[..., Recipe],
):
    check_splits(make_recipe(global_batch=48), range(1, 5), 2)
    refused = 0
    for batch in (16, 34, 64, 97):
        for nodes in (range(1, 4), range(2, 4), range(3, 8)):
            recipe = make_recipe(global_batch=batch, micro_batch=8)
            with pytest.raises(UserError, match=f"--nodes {nodes[0]}:{nodes[-1]} allows each") as refusal:
                check_splits(recipe, nodes, 2)
            _, _, proposed = str(refusal.value).partition("--set global_batch=")
            if proposed:
                check_splits(make_recipe(global_batch=int(proposed), micro_batch=8), nodes, 2)
            refused += bool(proposed)
    assert refused
    with pytest.raises(UserError, match=r"divide over 3 nodes x 1 rank, only over 1, 2, 4, 8, 16 and 2 more"):
        check_splits(make_recipe(global_batch=64), range(1, 99), 1)


def test_the_line_about_accumulation():
    recipe = load_recipe(find_recipe("alexnet-512gpu"))
    line = explain(recipe, recipe, split_batch(recipe, 1))
    assert line == "recipe written for 512 ranks: 1 rank, micro-batch 128, 512 accumulation steps"


@pytest.mark.parametrize(
    ("name", "ranks", "factor", "says"),
    [
        ("alexnet-512gpu", 128, 0.5, "batch 65536 -> 16384, lr 32 -> 16 (square-root scaling)"),
        ("cifar10-resnet18", 1, 0.5, "batch 256 -> 128, lr 0.4 -> 0.2 (linear scaling)"),
        ("demo", 2, 1.0, "2 accumulation steps"),
    ],
)
def test_scaling_keeps_a_ranks_share_and_scales_every_rate(name: str, ranks: int, factor: float, says: str):
    written = load_recipe(find_recipe(name))
    scaled = scale_recipe(written, ranks)
    assert scaled.global_batch / ranks == written.global_batch / written.ranks
    assert scaled.optim.lr == pytest.approx(factor * written.optim.lr)
    assert scaled.schedule.start_lr == pytest.approx(factor * written.schedule.start_lr)
    assert scaled.schedule.end_lr == pytest.approx(factor * written.schedule.end_lr)
    batching = split_batch(scaled, ranks)
    assert batching.micro_batch == split_batch(written, written.ranks).micro_batch
    assert explain(written, scaled, batching).endswith(says)
