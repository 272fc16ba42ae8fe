"""Runs of ResNet-50 beside MLCommons' reference convergence points."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.compare.reference import judge_by_reference, reference_at
from imagenet_fast.metrics.past_run import PastRun
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, write_job
from imagenet_fast.recipe.load import load_recipe


def past_run(
    folder: Path, top1: dict[int, float], recipe: str = "resnet50-8gpu", batch: int = 3200, images: int = 1_281_167,
    overrides: tuple[str, ...] = (), init_from: Path | None = None,
) -> PastRun:  # fmt: skip
    written = load_recipe(recipe, overrides=overrides)
    job = Job(recipe, written, split_batch(written, written.reference_ranks), None, folder, init_from=init_from)
    write_job(job, folder / "job.json")
    begun: dict[str, Any] = {"event": "run", "global_batch": batch, "train_images": images}
    events = [begun, *({"event": "eval", "epoch": epoch, "top1": value} for epoch, value in top1.items())]
    return PastRun(folder, events, "not ended")


def test_the_points_are_mlcommons_and_between_them_epochs_are_interpolated():
    for batch, mean in ((1632, 35.0), (3264, 35.2), (4096, 40.0), (13056, 45.4), (58880, 79.9), (67840, 85.9)):
        assert reference_at(batch)[0] == pytest.approx(mean, abs=0.06)
    assert reference_at(3680) == (pytest.approx((35.2 + 40.0) / 2, abs=0.06), 36.5, 39.5)


def test_a_run_is_normal_slower_or_better(tmp_path: Path):
    for top1, said in (
        ({31: 74.0, 35: 75.95}, r"^normal: 75.9 % in epoch 35 \(or since 32\), and the reference needs 35.2 epochs"),
        ({34: 75.0, 35: 75.95}, r"^normal: 75.9 % in epoch 35, and"),
        ({31: 75.95}, "^better than the field: 75.9 % in epoch 31"),
        ({37: 75.8, 38: 75.9}, "^slower than the field: 75.9 % in epoch 38"),
        ({36: 75.0, 40: 75.2}, "^slower than the field: not at 75.9 % after 40 epochs"),
        ({3: 30.0}, r"^not compared \(not ended\): not at 75.9 % after 3 epochs"),
    ):
        verdict = judge_by_reference(past_run(tmp_path, top1))
        assert re.search(said, verdict), verdict
        assert "\n" not in verdict


@pytest.mark.parametrize("batch", [58_880, 65_536, 67_840])
def test_epochs_of_whole_batches_are_shorter_than_the_references(tmp_path: Path, batch: int):
    """A run of as many images as the reference's mean is normal, though it counts 2 to 3 epochs more."""
    passes = 1_281_167 // batch * batch / 1_281_167
    mean, *_ = reference_at(batch)
    reached = math.ceil(mean / passes)
    assert reached > mean + 1.5
    run = past_run(tmp_path, {reached - 1: 75.0, reached: 75.9}, recipe="resnet50-512gpu", batch=batch)
    verdict = judge_by_reference(run)
    assert verdict.startswith(f"normal: 75.9 % in epoch {reached}, and")
    assert verdict.endswith(f"an epoch of the run has {100 * passes:.1f} % of the images")


def test_what_cannot_be_compared_says_why(tmp_path: Path):
    for changes, said in (
        ({"recipe": "alexnet-8gpu"}, "its model is alexnet_bn, and the points are for resnet50"),
        ({"images": 50_000}, "it was trained on 50000 images, and the points are for ImageNet's 1281167"),
        ({"batch": 408}, "its batch is 408, and there are points from 1632 to 67840 alone"),
        ({"init_from": Path("/w.pth")}, "it starts from the weights /w.pth, and the reference from fresh ones"),
        ({"overrides": ("data.eval_size=256",)}, "it was evaluated at 256 pixels, and the points are for 224"),
    ):
        assert judge_by_reference(past_run(tmp_path, {35: 76.0}, **changes)) == f"not compared: {said}"
    (tmp_path / "job.json").unlink()
    assert judge_by_reference(PastRun(tmp_path, [], "failed")) == "not compared: its job.json is missing or damaged"
