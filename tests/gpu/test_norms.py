"""Norms by kernels on a GPU. Run with `pytest tests/gpu` where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_fused_norm import BF16, FIRST, FP32, agree, images, norm_of

MORE = [((2, 64, 61, 59), BF16, "add"), ((2, 64, 61, 59), BF16, "relu"), ((1, 512, 7, 3), BF16, "fork")]


@pytest.mark.parametrize("case", [*FIRST, *MORE], ids=str)
def test_outputs_gradients_and_statistics_are_those_of_float64(case: tuple[Any, ...]):
    agree(*case)


def test_a_norm_is_replayed_from_a_graph():
    """Nothing in it waits for the host, and what it allocates is the graph's own."""
    norm, x, r, dy = (
        norm_of(64, relu="after"),
        *(images((4, 64, 9, 9), FP32, seed).requires_grad_() for seed in range(3)),
    )

    def step() -> tuple[Tensor, ...]:
        y = norm(x, r)
        return y, *torch.autograd.grad(y, [x, r, norm.weight, norm.bias], dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launched = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, launched, captured))
    assert norm.num_batches_tracked == 2
