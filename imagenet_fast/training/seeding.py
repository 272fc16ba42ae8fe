"""Chance within the model, as of dropout: a function of (seed, step, rank)."""

from __future__ import annotations

import torch

from imagenet_fast.data.rng import bits
from imagenet_fast.distributed.init import DistContext


def seed_step(seed: int, step: int, world: DistContext) -> None:
    """Begin a step's random numbers, of the CPU's generator and of the device's, where (seed, step, rank) say.

    So a run that goes on at a step draws what one that never stopped would have. Compiled code and replayed CUDA graphs
    take their numbers from the same generators. The CPU's uses 32 bits of a seed, a GPU's all 64.
    """
    number = int(bits("step", seed, step, of=world.rank)[0])
    torch.default_generator.manual_seed(number)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(number)
