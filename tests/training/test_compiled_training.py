"""Compiled blocks: whole in training and in evaluation, and synchronisation has none compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests
from imagenet_fast.models import compile_blocks
from imagenet_fast.models.resnet import BasicBlock
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.training_step import build_step
from tests.conftest import tables
from tests.models.narrow import narrow_model
from tests.models.test_models import NETWORKS, PIECES

STEPS = 9
"""Gradients change places before the second, and until the seventh steps may be watched."""


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [BasicBlock(8, 8), BasicBlock(8, 8)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


BATCH = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(4)


@contextmanager
def compiling() -> Iterator[tuple[list[torch.fx.GraphModule], list[torch.fx.GraphModule]]]:
    """The graphs that are compiled in the block, and those that have run."""
    graphs, runs = list[torch.fx.GraphModule](), list[torch.fx.GraphModule]()

    def watched(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert all(isinstance(value, Tensor) for value in inputs), "a size is left open, so kernels are slower"
        graphs.append(graph)

        def run(*values: Any) -> Any:
            runs.append(graph)
            return graph.forward(*values)

        return run

    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend=watched):
        yield graphs, runs


def counted(begin: Callable[[nn.Module], Callable[[], object]]) -> list[tuple[int, int]]:
    """After each step: how many graphs have been compiled so far, and how often one has run."""
    counts = []
    with compiling() as (graphs, runs):
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


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize("sync", [{"kind": "lazy"}, *OTHERS], ids=["lazy", "ring", "auto"])
def test_learning_engines_compile_no_more_than_a_plain_loop(sync: dict[str, Any]):
    def ours(model: nn.Module) -> Callable[[], object]:
        recipe = parse_recipe("test", tables(reference_ranks=1, global_batch=4, compile=True, sync=sync))
        world = tests.world(0, 1)
        take_step = build_step(recipe, split_batch(recipe, 1), model, world, steps_per_epoch=4)
        return lambda: take_step(repeat(BATCH), lr=0.1)

    counts = counted(plain)
    assert counts[-1][1] == 2 * STEPS, "two blocks, each compiled as one piece"
    assert counted(ours) == counts


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "size"), [("cifarnet", 32), ("resnet50", 32), ("alexnet", 63), ("alexnet_bn", 67)])
def test_every_piece_runs_compiled_in_training_and_in_evaluation(kind: str, size: int):
    """For shapes that are constants, and the last batch of an evaluation, which is smaller, is no exception."""
    model = narrow_model(NETWORKS[kind], 10)
    with (
        compiling() as (_, runs),
        torch._dynamo.config.patch(
            recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=True
        ),
    ):
        compile_blocks(model)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 3, size, size)).square().mean()
            loss.backward()
            model.eval()
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                for images in (4, 3):
                    model(torch.randn(images, 3, size, size))
            model.train()
            assert len(runs) == 3 * PIECES[kind], "one forward in training, two in evaluation"
            runs.clear()
