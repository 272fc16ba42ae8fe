"""Steps of compiled blocks: synchronisation neither breaks them into pieces nor has them compiled again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import nn

import tests
from imagenet_fast.models import compile_blocks
from imagenet_fast.models.resnet import BasicBlock
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.train_step import build_step
from tests.conftest import tables

STEPS = 9
"""Gradients change places before the second, and until the seventh steps may be watched."""


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [BasicBlock(8, 8), BasicBlock(8, 8)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


BATCH = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def counted(begin: Callable[[nn.Module], Callable[[], object]]) -> list[tuple[int, int]]:
    """After each step: how many graphs have been compiled so far, and how often one has run."""
    graphs: list[torch.fx.GraphModule] = []
    runs: list[torch.fx.GraphModule] = []

    def watched(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*values: Any) -> Any:
            runs.append(graph)
            return graph.forward(*values)

        return run

    torch._dynamo.reset()
    counts = []
    with torch.compiler.set_stance("default", force_backend=watched):
        take_step = begin(network())
        for _ in range(STEPS):
            take_step()
            counts.append((len(graphs), len(runs)))
    return counts


def plain(model: nn.Module) -> Callable[[], object]:
    compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def take_step() -> None:
        optimizer.zero_grad()
        images, labels = BATCH
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return take_step


OTHERS = [pytest.param(sync, marks=pytest.mark.ci) for sync in ({"kind": "ring"}, {"kind": "auto", "defer": False})]


@pytest.mark.parametrize("sync", [{"kind": "lazy"}, *OTHERS], ids=["lazy", "ring", "auto"])
def test_learning_engines_compile_no_more_than_a_plain_loop(sync: dict[str, Any]):
    def ours(model: nn.Module) -> Callable[[], object]:
        recipe = parse_recipe("test", tables(ranks=1, global_batch=4, compile=True, sync=sync))
        world = tests.world(0, 1)
        take_step = build_step(recipe, split_batch(recipe, 1), model, world, steps_per_epoch=4)
        return lambda: take_step(repeat(BATCH), lr=0.1)

    counts = counted(plain)
    assert counts[-1][1] == 2 * STEPS, "two blocks, each compiled as one piece"
    assert counted(ours) == counts
