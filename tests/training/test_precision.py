"""fp16: a non-finite gradient anywhere skips the step everywhere, and the scale follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests
from imagenet_fast.distributed import init
from imagenet_fast.distributed.init import all_compute_bf16
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import BFloat16, Float16, Full, TensorFloat
from imagenet_fast.recipe.sync_config import LazySync
from imagenet_fast.sync import attach
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.optimizers import SGD
from imagenet_fast.training.precision import LossScaler, effective_precision, precision_note
from imagenet_fast.training.train_step import build_step
from tests.conftest import tables
from tests.ranks import run

CPU = torch.device("cpu")


def test_all_ranks_agree_to_skip_when_one_overflows():
    for scale, skipped, unchanged, weights, told in run(3, _overflow_on_rank_1):
        assert skipped == 1
        assert told == {"loss_scale": 2.0**15, "skipped_steps": 1}, "also by a scale that goes on from this one's state"
        assert unchanged
        assert scale == 2.0**15
        assert weights == pytest.approx([1 - 0.1 * 1] * 4, rel=1e-3)  # the good step's mean gradient is 1, in fp16


def _overflow_on_rank_1() -> tuple[float, float, bool, list[float], dict[str, float]]:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    forward, sync = attach(model, LazySync(wire="fp16", threshold_mb=0))
    optimizer = SGD(model.parameters(), lr=0.1)
    scale = LossScaler(Float16(kind="fp16"), "fp16", CPU)
    assert scale.largest == 65504
    sync.guard(scale.largest)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        sync.zero_grad()
        scale(forward(inputs).sum()).backward()
        sync.end_backward()
        optimizer.found_inf = found = sync.found_inf
        optimizer.grad_scale = scale.end_step(found)
        assert found is not None
        assert optimizer.grad_scale is not None
        sync.step(optimizer)
        return found

    skipped = step(torch.full((1, 4), 1e6 if dist.get_rank() == 1 else 0.5)).item()
    unchanged = bool((model.weight == 1).all())
    step(torch.full((1, 4), (dist.get_rank() + 1) / 2))
    later = LossScaler(Float16(kind="fp16"), "fp16", CPU)
    later.load_state_dict(scale.state_dict())
    return scale.scale.item(), skipped, unchanged, model.weight.flatten().tolist(), later.told(*map(float, later.state))


def test_a_static_scale_stays_and_bf16_has_none():
    weight = nn.Parameter(torch.ones(3))
    fixed = LossScaler(Float16(kind="fp16", loss_scale=1000.0), "bf16", CPU)
    (fixed(weight.sum())).backward()
    scale = fixed.end_step(torch.ones(()))
    assert scale is not None
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad / scale, torch.ones(3))
    assert fixed.scale == 1000
    assert fixed.told(*map(float, fixed.state)) == {"loss_scale": 1000, "skipped_steps": 1}
    assert fixed.largest == torch.finfo(torch.bfloat16).max
    none = LossScaler(BFloat16(kind="bf16"), "bf16", CPU)
    assert none(weight.sum()) == 3
    assert none.end_step(None) is None
    assert none.largest is None
    assert none.told(*map(float, none.state)) == {}


def test_an_fp16_wire_is_watched_in_any_precision():
    watched = LossScaler(BFloat16(kind="bf16"), "fp16", CPU)
    assert watched.largest == 65504
    for overflows in (0.0, 1.0, 1.0):
        assert watched.end_step(torch.tensor(overflows)) is None
    assert watched.told(*map(float, watched.state)) == {"skipped_steps": 2}


def test_fp32_is_fp32_on_gpus_too_unless_tf32_is_asked_for():
    kinds = ["fp32", "tf32", "bf16", "fp32"]
    (seen,) = run(1, _float32_math, kinds)  # in a process of its own, whose settings they are
    exact, fast = ("highest", False), ("high", True)
    assert seen == [exact, fast, fast, exact]


def _float32_math(kinds: list[str]) -> list[tuple[str, bool]]:
    """Return whether products and convolutions may be made in TF32, once a step of each precision has been built."""
    world = tests.world(0, 1)
    seen = []
    for kind in kinds:
        recipe = parse_recipe("test", tables(ranks=1, precision={"kind": kind}))
        build_step(recipe, split_batch(recipe, 1), build_initial_model(recipe, 10, world), world, 4)
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    return seen


def test_without_bf16_instructions_only_bf16_becomes_fp32():
    full, fast, half, bf16 = Full(kind="fp32"), TensorFloat(kind="tf32"), Float16(kind="fp16"), BFloat16(kind="bf16")
    for precision in (full, fast, half, bf16):
        assert effective_precision(precision, bf16=True) == precision
        assert precision_note(precision, bf16=True) == ""
    assert [effective_precision(precision, bf16=False) for precision in (full, fast, half, bf16)] == [
        full, fast, half, full
    ]  # fmt: skip
    assert precision_note(half, bf16=False) == ""
    assert precision_note(bf16, bf16=False).startswith("layers compute in fp32, not in bf16")


def test_ranks_agree_on_bf16():
    assert run(3, _agreed, [True, True, True]) == [True] * 3
    assert run(3, _agreed, [True, False, True]) == [False] * 3


def _agreed(supported: list[bool]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "computes_bf16", lambda device: supported[dist.get_rank()])
        return all_compute_bf16(CPU)


@pytest.mark.parametrize("kind", ["lazy", "hybrid"])
def test_without_bf16_instructions_layers_compute_in_fp32_and_gradients_are_sent_in_bf16(kind: str):
    for (usual, sent), (without, sent_too) in zip(
        run(2, _dtypes, kind, True), run(2, _dtypes, kind, False), strict=True
    ):
        assert (usual, without) == (torch.bfloat16, torch.float32)
        assert sent == sent_too > 0


def _dtypes(kind: str, bf16: bool) -> tuple[torch.dtype, float]:
    """Return the dtype of the logits in a step, and the bytes that it sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = tests.world(rank, ranks, bf16=bf16)
    sync, precision = {"kind": kind, "wire": "bf16"}, {"kind": "bf16"}
    recipe = parse_recipe("test", tables(sync=sync, precision=precision, global_batch=4, micro_batch=2))
    step = build_step(recipe, split_batch(recipe, ranks), build_initial_model(recipe, 10, world), world, 4)
    seen: list[torch.dtype] = []
    layers = [module for module in step.state.model.modules() if isinstance(module, nn.Linear)]
    layers[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step(iter([(torch.randn(2, 3, 32, 32), torch.arange(2))]), lr=0.1)
    return seen[0], step.state.sent_bytes


@pytest.mark.parametrize(("kind", "accumulation"), [("lazy", 1), ("hybrid", 2), ("ddp", 2)])
def test_a_step_that_is_skipped_moves_no_batch_norm_statistics(kind: str, accumulation: int):
    """Images of 6e4 overflow in fp16: a running mean of inf would never come back."""
    for before, skipped, after, averaged, steps in run(2, _overflow_in_a_layer, kind, accumulation):
        assert steps == 1
        assert all(torch.equal(value, before[name]) for name, value in skipped.items())
        assert any(not torch.equal(value, before[name]) for name, value in after.items()), "a good step moves them"
        assert all(value.isfinite().all() for value in (*after.values(), *averaged.values()))


def _overflow_in_a_layer(kind: str, accumulation: int) -> tuple[Any, ...]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = tests.world(rank, ranks)
    changes = {
        "global_batch": 8 * accumulation,
        "micro_batch": 4,
        "ema_decay": 0.5,
        "precision": {"kind": "fp16", "loss_scale": 128},
    }
    recipe = parse_recipe("test", tables(sync={"kind": kind, "wire": "fp32"}, **changes))
    step = build_step(recipe, split_batch(recipe, ranks), build_initial_model(recipe, 10, world), world, 4)
    state, labels = step.state, torch.arange(4)

    def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    def images(height: float) -> torch.Tensor:
        return torch.full((4, 3, 32, 32), height).half() if height else torch.randn(4, 3, 32, 32).half()

    step(iter([(images(0), labels)] * accumulation), lr=0.1)
    before = statistics(state.model)
    too_high = 6e4 if rank == 1 else 0  # on one rank, in the last micro-batch
    step(iter([(images(0), labels)] * (accumulation - 1) + [(images(too_high), labels)]), lr=0.1)
    skipped = statistics(state.model)
    step(iter([(images(0), labels)] * accumulation), lr=0.1)
    state.settle()
    return before, skipped, statistics(state.model), statistics(state.judged), int(state.scale.state[1])
