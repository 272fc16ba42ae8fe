"""Say what takes the host's time in training steps of one rank, and on a GPU what one CUDA graph of a step would save.

    python -m experiments.host_time [--model resnet50] [--image-size 224] [--batch 128] [--steps 20] [--sync lazy]

Synthetic images, bf16 and SGD. Backward runs on the main thread, so that hooks of parameters are seen, too; the profile
makes calls of Python dearer than they are. A replayed graph has the learning rate and images of its capture, so it is a
measurement, not a way to train. The exit code is 1 if the step cannot be captured.
"""

from __future__ import annotations

import pstats
import time
from collections.abc import Callable
from cProfile import Profile
from itertools import repeat

import torch
import torch.distributed as dist
import typer

from imagenet_fast.bench.train_step import our_step, single_rank_world, step_recipe, synthetic_batches

_WARMUP_STEPS = 11
"""As many as torch takes for DDP: then kernels are chosen, and the pool knows the order of its layers."""


def main(model: str = "resnet50", image_size: int = 224, batch: int = 128, steps: int = 20, sync: str = "lazy") -> None:
    """Profile the steps, then capture and replay one."""
    recipe = step_recipe(model, image_size, batch, "bf16", compiled=False, sync=sync)
    world = single_rank_world()
    take_step, images = our_step(recipe, world), next(synthetic_batches(recipe, world.device))

    def step() -> None:
        take_step(repeat(images), recipe.optim.lr)

    def report(name: str, way: Callable[[], object]) -> None:
        whole_s, host_s = timed(way, steps)
        print(f"a step of {sync}, {name}, takes {1e3 * whole_s:.1f} ms, and the host {1e3 * host_s:.1f} ms")

    with torch.autograd.set_multithreading_enabled(False):
        timed(step, _WARMUP_STEPS)
        report("on one thread", step)
        with Profile() as profile:
            timed(step, steps)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)
    if world.device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # capture forbids the default stream's implicit synchronisation
            timed(step, _WARMUP_STEPS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            report("launched anew", step)
            report("replayed from a CUDA graph", graph.replay)
    dist.destroy_process_group()


def timed(way: Callable[[], object], steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and of it until the host has launched it."""
    settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    settle()
    begun = time.perf_counter()
    for _ in range(steps):
        way()
    host_s = time.perf_counter() - begun
    settle()
    return (time.perf_counter() - begun) / steps, host_s / steps


if __name__ == "__main__":
    typer.run(main)
