"""nn.DataParallel as a row of `bench step`. Run with `pytest tests/gpu` where there are two GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from imagenet_fast.bench.train_step import bench_step, data_parallel, step_recipe
from imagenet_fast.models import build_model
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.precision import set_float32_math
from tests.conftest import tables
from tests.gpu.conftest import two_gpus

GPUS = torch.cuda.device_count()

pytestmark = two_gpus


def test_data_parallel_is_timed_with_as_many_images_on_each_gpu():
    recipe = step_recipe("resnet18", 32, 8, "bf16", False)
    plain, spread, ours = bench_step(recipe, [recipe], rounds=1, steps=2)
    assert [plain.loop, spread.loop, ours.loop] == ["plain PyTorch", f"nn.DataParallel, {GPUS} GPUs", "ours, lazy"]
    assert spread.images_per_s == pytest.approx(GPUS * 8 / spread.step_s)
    assert plain.images_per_s == pytest.approx(8 / plain.step_s)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_data_parallel_gradients_and_precision(precision: str):
    recipe = parse_recipe("test", tables(precision={"kind": precision}))
    set_float32_math(recipe.precision)
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = build_model(recipe.model, 10).to(device, memory_format=torch.channels_last).eval()  # norms see no batch
    images = torch.randn(4 * GPUS, 3, 64, 64, device=device)
    computed: list[tuple[torch.device, torch.dtype]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        computed.append((output.device, output.dtype))

    def gradients(forward: nn.Module) -> list[Tensor]:
        model.zero_grad()
        forward(images).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    spread = data_parallel(model, recipe.precision, GPUS)
    expected = gradients(data_parallel(model, recipe.precision, 1))
    model.get_submodule("layer4.1.conv2").register_forward_hook(note)
    found = gradients(spread)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert sorted((d.index, t) for d, t in computed) == [(index, dtype) for index in range(GPUS)]
    assert len(found) == len(expected) == len(list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < (1e-4 if precision == "fp32" else 3e-2) * theirs.norm()
