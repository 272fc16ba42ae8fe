"""Memory that the allocator gives out again is nobody's any longer: for two ranks, on a GPU each.

Without the caching allocator (``PYTORCH_NO_CUDA_MEMORY_CACHING=1``) whoever uses what he has given back fails at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, PowerSgdSync, RingSync, SparseSync
from imagenet_fast.training.optimizers import build_optimizer
from tests.gpu.conftest import two_gpus
from tests.ranks import run
from tests.sync.given import SMALL, Given, integers, pooled, weights_of
from tests.sync.loops import unmeasured

pytestmark = two_gpus
SPARSE = SparseSync(wire="bf16", sparsity=0.75, chunk=32, dense_epochs=0, ramp_epochs=0, threshold_mb=0)
EXACT: tuple[EngineSettings, ...] = (
    LazySync(wire="bf16", threshold_mb=0), RingSync(wire="bf16", bucket_mb=0), HybridSync(wire="bf16", fuse_mb=0),
    DearSync(wire="bf16", bucket_mb=0), SPARSE,
)  # fmt: skip
INEXACT: tuple[EngineSettings, ...] = (LazySync(wire="int8", threshold_mb=0), PowerSgdSync(wire="bf16", rank=1))


def test_two_ranks_train_as_one_while_memory_is_reused():
    """A pool of one rank sends nothing. The gradients are integers, which 16 bits hold and whose mean is exact."""
    (alone,) = run(1, _each, EXACT, backend="nccl")
    ours, theirs = run(2, _each, (*EXACT, *INEXACT), backend="nccl")
    for settings, expected, here, there in zip(EXACT, alone, ours, theirs, strict=False):
        assert torch.equal(here, expected), settings
        assert torch.equal(there, expected), settings
    for settings, here, there in zip(INEXACT, ours[len(EXACT) :], theirs[len(EXACT) :], strict=True):
        assert torch.equal(here, there), settings


def _each(some: Sequence[EngineSettings]) -> list[Tensor]:
    return [trained(settings, "cuda", 200 if settings == SPARSE else 20) for settings in some]


def trained(settings: EngineSettings, device: str, steps: int) -> Tensor:
    """Weights after some steps, between and in which memory is allocated and written."""
    model = Given(*([shape] for shape in SMALL)).to(device)
    with unmeasured():
        pool = pooled(model, settings)
    optimizer = build_optimizer(Sgd(kind="sgd", lr=2.0**-7, momentum=0.5, weight_decay=0.0), model)
    for step in range(steps):
        pool.zero_grad()
        model([gradient.to(device) for gradient in integers(SMALL, step, 0, 2)]).backward()
        scribble(device)
        pool.end_backward()
        scribble(device)
        pool.step(optimizer)
        scribble(device)
    pool.settle()
    result = weights_of(model).cpu()
    pool.close()
    return result


def scribble(device: str) -> None:
    """Whoever still uses memory that he has given back finds this there."""
    for elements in (16, 32, 64, 128, 256, 512):
        torch.full((elements,), 1e9, device=device)
