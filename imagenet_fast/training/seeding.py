"""Seed the random numbers within the model, such as dropout, by (seed, step, rank)."""

from __future__ import annotations

import torch

from imagenet_fast.data.rng import bits
from imagenet_fast.distributed.init import DistContext


def seed_step(seed: int, step: int, world: DistContext) -> None:
    """Seed the generators of the CPU and of this rank's device by (seed, step, rank).

    A run resumed at a step so draws the same numbers as an uninterrupted one. Compiled code and replayed CUDA graphs
    use the same generators. The CPU's generator uses 32 bits of a seed, a GPU's all 64.
    """
    number = int(bits("step", seed, step, of=world.rank)[0])
    torch.default_generator.manual_seed(number)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(number)
