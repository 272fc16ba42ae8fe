"""nn.DataParallel as a row of `bench step`. Run with `pytest tests/gpu` where there are two GPUs."""

from __future__ import annotations

import pytest
import torch

from imagenet_fast.bench.train_step import bench_step, step_recipe

GPUS = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs on this node")


def test_data_parallel_is_timed_with_as_many_images_on_each_gpu():
    recipe = step_recipe("resnet18", 32, 8, "bf16", False)
    plain, spread, ours = bench_step(recipe, [recipe], rounds=1, steps=2)
    assert [plain.loop, spread.loop, ours.loop] == ["plain PyTorch", f"nn.DataParallel, {GPUS} GPUs", "ours, lazy"]
    assert spread.images_per_s == pytest.approx(GPUS * 8 / spread.step_s)
    assert plain.images_per_s == pytest.approx(8 / plain.step_s)
