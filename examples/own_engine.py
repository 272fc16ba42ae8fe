"""Write an engine of one's own, check that it is exact, and time it beside the others.

    torchrun --nproc-per-node 2 examples/own_engine.py

`tests/sync/test_contract.py` runs it through every wire dtype and number of ranks that ours run through.
"""

from __future__ import annotations

import math
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.init import current_world
from imagenet_fast.recipe.sync_table import Wire
from imagenet_fast.sync import Declaration, EngineSettings, GradientPool, HybridSync, LazySync, ParamSlot


def pair_of(slot: ParamSlot) -> int:
    """Return the number of the pair that a layer of an ``nn.Sequential`` is in."""
    return int(slot.layer.rpartition(".")[2]) // 2


def by_pairs(wire: Wire) -> Declaration:
    """Return an engine that sends layers by twos: scattered during backward, gathered before the next forward."""
    return Declaration(
        wire, "read", math.inf, group_key=pair_of, collective="pairwise", prioritized=True, split_reduce_scatter=True
    )


def small_net() -> nn.Sequential:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def train(engine: Declaration | EngineSettings, device: torch.device, steps: int = 30) -> tuple[Tensor, float]:
    """Train on random numbers, other ones on every rank.

    Args:
        engine: The engine, or the settings of one of ours.
        device: Where to train.
        steps: Number of steps.

    Returns:
        All weights as one tensor, and the median time of a step in seconds.
    """
    model = small_net().to(device)
    pool = GradientPool(model, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seconds = []
    for step in range(steps):
        inputs = torch.randn(64, 512, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        inputs = inputs.to(device)
        begun = time.perf_counter()
        pool.zero_grad()
        model(inputs).square().mean().backward()
        pool.step(optimizer)
        seconds.append(time.perf_counter() - begun)
    pool.close()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return weights, median(seconds)


def main() -> None:
    """Compare the engine with two of ours."""
    world = current_world()
    engines: dict[str, Declaration | EngineSettings] = {
        "lazy": LazySync(wire="fp32"),
        "hybrid": HybridSync(wire="fp32"),
        "pairs": by_pairs("fp32"),
    }
    results = {name: train(engine, world.device) for name, engine in engines.items()}
    exact, _ = results["lazy"]
    for name, (weights, seconds) in results.items():
        torch.testing.assert_close(weights, exact, rtol=1e-4, atol=1e-6)  # sums may have another order
        if world.is_main:
            print(f"{name:8} {1e3 * seconds:6.1f} ms a step, same weights as lazy", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
