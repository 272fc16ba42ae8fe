"""Compare a training step replayed from a CUDA graph with the same step launched normally; needs a GPU.

    python scripts/graphed_step.py [--model resnet50] [--batch 128] [--steps 30] [--sync lazy]

It uses one rank, synthetic images of 224 pixels, bf16 and SGD. A replay saves host time: a step on 512 GPUs takes about
as long as Python needs to launch it. Learning rate and images are fixed at capture, so this is only a measurement, not
a way to train. The exit code is 1 if the step cannot be captured, or if there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from imagenet_fast.bench.train_step import alone, our_step, step_recipe, synthetic_batches

_WARMUP_STEPS = 11
"""Number of warm-up steps, as torch uses for DDP.

After them, kernels are chosen, and the pool knows the order of its layers.
"""
_BLOCKS = 5


def main() -> int:
    """Capture and time the step, and return the exit code."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--model", default="resnet50")
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--sync", default="lazy")
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return 1
    recipe = step_recipe(chosen.model, 224, chosen.batch, "bf16", compiled=False, sync=chosen.sync)
    world = alone()
    take_step, batch = our_step(recipe, world), next(synthetic_batches(recipe, world.device))

    def step() -> None:
        take_step(repeat(batch), recipe.optim.lr)

    beside = torch.cuda.Stream()  # capture forbids the implicit synchronisation of the default stream
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(_WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"a step of {chosen.sync} cannot be captured: {error}")
        return 1
    ways: dict[str, Callable[[], None]] = {"launched anew": step, "graph": graph.replay}
    times = {name: [_timed(way, chosen.steps) for _ in range(_BLOCKS)] for name, way in ways.items()}
    print(f"{'step':16}{'GPU ms':>8}{'host ms':>9}")
    for name, blocks in times.items():
        gpu, host = (median(column) for column in zip(*blocks, strict=True))
        print(f"{name:16}{1e3 * gpu:8.2f}{1e3 * host:9.2f}")
    dist.destroy_process_group()
    return 0


def _timed(way: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return the seconds per step by the GPU's clock, and until the host has launched it."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun.record()
    start = time.perf_counter()
    for _ in range(steps):
        way()
    host_s = time.perf_counter() - start
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 1e3 / steps, host_s / steps


if __name__ == "__main__":
    raise SystemExit(main())
