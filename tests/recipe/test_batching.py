"""The global batch is the recipe's, whatever the ranks; layouts, and which divide over the ranks there are."""

from __future__ import annotations

import inspect
import re
from itertools import product
from typing import Any

import pytest

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import explain, scale_recipe, split_batch
from imagenet_fast.recipe.load import load_recipe, parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import refusal_of, tables


def test_a_batch_is_split_as_the_table_of_examples_has_it():
    lines = [re.findall(r"\d+", line) for line in inspect.getdoc(split_batch).splitlines() if line[-1:].isdigit()]
    for batch, ranks, micro_batch, pipeline, micro_batches, on, *expected in (map(int, line) for line in lines):
        parallel = {"pipeline": pipeline, "micro_batches": micro_batches}
        batching = split_batch(laid(batch, micro_batch, ranks, **parallel), on)
        assert [batching.micro_batch, batching.accumulation, batching.readers] == expected
        assert batching.global_batch == batch
    assert len(lines) > 5
    assert "64 does not divide over 3 ranks in micro-batches of at most 8; one that does is --set global_batch=72" in (
        refusal_of(split_batch, laid(64, ranks=8), 3)
    )
    assert "17 does not divide over the recipe's 2 ranks; one that does is --set global_batch=18" in (
        refusal_of(split_batch, laid(17), 2)
    )


def test_one_small_image_at_a_time_is_too_little_for_batch_norms():
    for model, size, images, told in (
        ("resnet18", 32, 1, "a micro-batch of 1 image of 32 pixels is too little for the batch norms of resnet18"),
        ("cifarnet", 16, 1, "too little for the batch norms of cifarnet"),
        ("resnet18", 32, 2, ""), ("resnet18", 33, 1, ""), ("cifarnet", 32, 1, ""), ("alexnet_bn", 98, 1, ""),
    ):  # fmt: skip
        changes = {"model": {"kind": model}, "reference_ranks": 1, "global_batch": 2, "micro_batch": images}
        recipe = parse_recipe("test", tables(data__image_size=size, **changes))
        if told:
            assert told in refusal_of(split_batch, recipe, 1)
        else:
            split_batch(recipe, 1)


def test_every_split_keeps_the_global_batch_or_names_one_that_works():
    def plain(batch: int) -> Recipe:
        return parse_recipe("test", tables(global_batch=batch, reference_ranks=1, micro_batch=8, data__image_size=128))

    advised = []
    for batch, ranks in (*product((16, 48, 60, 97, 128), range(1, 20)), (65536, 10007)):
        recipe = plain(batch)
        try:
            batching = split_batch(recipe, ranks)
        except UserError as error:
            advised.append(int(str(error).partition("--set global_batch=")[2].partition(",")[0]))
            recipe = plain(advised[-1])
            batching = split_batch(recipe, ranks)
        assert batching.global_batch == recipe.global_batch
        assert batching.micro_batch <= recipe.micro_batch
    assert advised


def test_scaling_keeps_a_ranks_share_and_scales_every_rate():
    for name, ranks, factor, says in (
        ("alexnet-512gpu", 128, 0.5, "batch 65536 -> 16384, lr 32 -> 16 (square-root scaling)"),
        ("cifar10-resnet18", 1, 0.5, "batch 256 -> 128, lr 0.4 -> 0.2 (linear scaling)"),
        ("demo", 2, 1.0, "1 accumulation step"),
        ("resnet50-8gpu-mild", 4, 0.5, ", decoupled weight decay 0.0005 -> 0.00025, ema_decay 0.99309 -> 0.9965"),
    ):
        written = load_recipe(name)
        scaled = scale_recipe(written, ranks)
        assert scaled.global_batch / ranks == written.global_batch / written.reference_ranks
        assert scaled.optim.lr == pytest.approx(factor * written.optim.lr)
        assert scaled.schedule.start_lr == pytest.approx(factor * written.schedule.start_lr)
        assert scaled.schedule.end_lr == pytest.approx(factor * written.schedule.end_lr)
        batching = split_batch(scaled, ranks)
        assert batching.micro_batch == split_batch(written, written.reference_ranks).micro_batch
        assert explain(written, scaled, batching).endswith(says)


def test_what_works_once_a_step_is_scaled_to_the_same_an_epoch():
    written = load_recipe("resnet50-8gpu-mild")
    for ranks in (1, 4, 64):
        scaled, ratio = scale_recipe(written, ranks), 8 / ranks
        assert (1 - scaled.optim.weight_decay) ** ratio == pytest.approx(1 - written.optim.weight_decay, abs=1e-5)
        assert scaled.ema_decay**ratio == pytest.approx(written.ema_decay)
    plain = load_recipe("resnet50-8gpu-ffcv16")
    assert scale_recipe(plain, 64).optim.weight_decay == plain.optim.weight_decay, "which the rate multiplies"


def laid(global_batch: int = 64, micro_batch: int = 0, ranks: int = 2, **parallel: Any) -> Recipe:
    """An AlexNet's recipe with a layout, and the other things that decide."""
    model = {"model": {"kind": "alexnet"}, "data__image_size": 63}
    batch = {"global_batch": global_batch, "micro_batch": micro_batch, "reference_ranks": ranks}
    return parse_recipe("test", tables(**model, **batch, parallel=parallel))


def test_a_layout_has_a_name():
    for parallel, ranks, name in (
        ({}, 1, "dp1"), ({}, 8, "dp8"), ({"tensor": 4}, 4, "tp4"), ({"tensor": 4}, 8, "dp2tp4"),
        ({"pipeline": 2, "micro_batches": 4}, 4, "pp2dp2"),
        ({"tensor": 2, "pipeline": 2, "micro_batches": 4}, 8, "pp2dp2tp2"),
    ):  # fmt: skip
        assert Parallel(**parallel).layout(ranks) == name


def test_uneven_layout_is_refused_with_a_fix():
    for parallel, ranks, sentence in (
        ({"tensor": 2}, 1, "parallel.tensor 2 needs a multiple of 2 ranks, and there is 1; choose another --nproc, or"),
        ({"tensor": 4}, 6, "a multiple of 4 ranks, and there are 6; choose another --nproc, or sizes whose product"),
        ({"tensor": 2, "pipeline": 2, "schedule": "gpipe"}, 6, "tensor 2 x parallel.pipeline 2 needs a multiple of 4"),
        ({"pipeline": 2, "micro_batches": 3}, 4, "micro-batches of at most 21; one that does is --set global_batch=66"),
        ({"pipeline": 2, "micro_batches": 100}, 4, "at most 1; one that does is --set global_batch=200, or"),
    ):
        assert sentence in refusal_of(split_batch, laid(**parallel), ranks)


def test_a_layout_is_explained():
    for parallel, micro_batch, ranks, line in (
        ({"pipeline": 2, "micro_batches": 4}, 0, 2, "2 ranks, micro-batch 16, 1 accumulation step; "),
        ({"pipeline": 2, "micro_batches": 4}, 8, 2, "micro-batch 8, 2 accumulation steps; "),
        ({"pipeline": 2, "schedule": "gpipe"}, 64, 2, "; 1 micro-batch under way by gpipe"),
        ({"tensor": 2, "pipeline": 2, "micro_batches": 4}, 2, 8, "data-parallel x 2; 4 micro-batches"),
        ({"tensor": 4}, 0, 64, ", data-parallel x 16"),
    ):
        recipe = laid(64, micro_batch, ranks, **parallel)
        assert line in explain(recipe, recipe, split_batch(recipe, ranks))
