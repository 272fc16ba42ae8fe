"""What a step, an optimiser and a loader cost on one rank: the figures are there, and say what they are of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from imagenet_fast.bench.kernels import OPTIMIZERS, count_kernels
from imagenet_fast.bench.loading import bench_loading, loading_table, make_photos, parse_loaders
from imagenet_fast.bench.overhead import bench_step, no_data_parallel, over_gpus, step_recipe, step_table
from imagenet_fast.data.imagefolder import scan
from imagenet_fast.recipe.schema import BFloat16


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_is_timed_beside_the_plain_loop(precision: str):
    variants = [step_recipe("resnet18", 32, 2, precision, False, sync) for sync in ("lazy", "allreduce")]
    rows = bench_step(variants[0], variants, rounds=1, steps=2)
    assert [row.loop for row in rows] == ["plain PyTorch", "ours, lazy", "ours, allreduce"]
    assert rows[0].ratio_to_plain == 1
    assert all(row.step_s > 0 and row.warmup_s > 0 for row in rows)
    assert all(row.host_s is None for row in rows), "without a GPU the host does not run ahead"
    assert step_table(rows).row_count == 3


def test_data_parallel_is_skipped_in_words_where_it_would_be_the_plain_loop(monkeypatch: pytest.MonkeyPatch):
    recipes = {compiled: step_recipe("resnet18", 32, 2, "bf16", compiled) for compiled in (False, True)}
    told = {}
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        told[gpus] = [no_data_parallel(recipes[compiled]) for compiled in (False, True)]
    assert told[0] == 2 * ["nn.DataParallel was skipped: it spreads a batch over GPUs, and of them there are none"]
    assert told[1] == 2 * ["nn.DataParallel was skipped: it spreads a batch over GPUs, and of them there is one"]
    assert told[2][0] is None
    assert "blocks are compiled for one copy" in str(told[2][1])


def test_data_parallel_casts_in_the_forward_itself():
    """Here without a GPU; `tests/gpu` looks at its threads."""
    spread = over_gpus(torch.nn.Linear(3, 2), BFloat16(kind="bf16"), 2)
    assert spread(torch.ones(4, 3)).dtype == torch.bfloat16


def test_an_optimisers_operators_do_not_grow_with_the_tensors():
    counts = {model: count_kernels(step_recipe(model, 224, 1, "fp32", False)) for model in ("resnet18", "resnet50")}
    small, large = counts.values()
    assert [row.optimizer for row in small] == list(OPTIMIZERS)
    assert [row.tensors for row in small] == [62] * 3
    assert [row.tensors for row in large] == [161] * 3
    assert [row.operators for row in small] == [row.operators for row in large]
    assert all(row.kernels is None for row in small), "a CPU launches none"


def test_loaders_are_timed_over_photos_of_the_usual_size(tmp_path: Path):
    make_photos(tmp_path, 3)
    train, val = scan(tmp_path)
    assert (len(train), len(val)) == (3, 1)
    assert all(50_000 < Path(path).stat().st_size < 200_000 for path in train.paths)
    rates = bench_loading(["synthetic", "dali"], None, image_size=32, batch=2, workers=1, seconds=0.01)
    assert [rate.loader for rate in rates] == ["synthetic", "dali"]
    assert all(rate.images_per_s for rate in rates)


def test_where_dali_is_not_installed_the_table_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (rate,) = bench_loading(["dali"], None, image_size=32, batch=2, workers=1, seconds=0)
    assert rate.images_per_s is None
    assert list(loading_table([rate]).columns[1].cells) == ["is not installed"]


def test_loaders_are_chosen_by_name(refusal: Callable[..., str]):
    assert parse_loaders("dali,synthetic") == ["dali", "synthetic"]
    assert "--loaders dali,disk" in refusal("bench", "loaders", "--loaders", "dali,disk")
