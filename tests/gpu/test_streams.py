"""Streams that lag behind read what was meant for them. Run with `pytest tests/gpu` where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import EngineSettings, LazySync, PowerSgdSync, SparseSync
from imagenet_fast.training.optimizers import build_optimizer
from tests.gpu.test_checkpoints import moved
from tests.sync.given import SMALL, Given, integers, pooled, weights_of


def test_sparse_chooses_the_same_chunks_though_its_norms_are_read_late():
    """On a busy GPU, whose allocator hands freed memory out at once, as on a CPU."""
    on_gpu = sparsely_trained(torch.device("cuda", 0))
    assert torch.equal(on_gpu, sparsely_trained(torch.device("cpu")))


@pytest.mark.parametrize("settings", [LazySync(wire="int8"), PowerSgdSync(wire="fp32", rank=2)])
def test_a_state_that_was_read_on_the_cpu_goes_on_on_the_gpu(settings: EngineSettings):
    assert torch.equal(*(resumed(settings, torch.device(place)) for place in ("cuda", "cpu")))


def resumed(settings: EngineSettings, place: torch.device) -> Tensor:
    """Train on the GPU, with the pool's state moved to ``place`` and loaded in between."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to("cuda")
    pool = pooled(model, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(16, 64).to("cuda")
    for step in range(4):
        if step == 2:
            pool.load_state_dict(moved(pool.state_dict(), place))
        pool.zero_grad()
        model(images).square().mean().backward()
        pool.step(optimizer)
    pool.close()
    return weights_of(model).cpu()


def sparsely_trained(device: torch.device) -> Tensor:
    """With gradients of integers, so that sums have no order."""
    model = Given(*([shape] for shape in SMALL)).to(device)
    settings = SparseSync(wire="fp32", sparsity=0.75, chunk=32, dense_epochs=0, ramp_epochs=0)
    pool = pooled(model, settings)
    optimizer = build_optimizer(Sgd(kind="sgd", lr=2.0**-7, momentum=0.5, weight_decay=0.0), model)
    engine = pool.engine
    for step in range(24):
        pool.zero_grad()
        model([gradient.to(device) for gradient in integers(SMALL, step, 0, 2)]).backward()
        if device.type == "cuda":
            with torch.cuda.stream(engine._topology.stream((), "packing")._stream):
                torch.cuda._sleep(10**7)
        pool.end_backward()
        for elements in range(1, 17):
            torch.full((elements,), 1e9 * step, device=device)
        pool.step(optimizer)
    pool.close()
    return weights_of(model).cpu()
