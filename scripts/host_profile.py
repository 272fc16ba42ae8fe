"""Profile the host's time in training steps of one rank, function by function; on a GPU if there is one.

    python scripts/host_profile.py [--model resnet50] [--image-size 224] [--batch 128] [--steps 20] [--sync lazy]

It uses synthetic images, bf16 and SGD. Backward runs on the main thread, so that hooks of parameters are seen, too. The
profile makes calls of Python dearer than they are: the time of a step without it is printed first.
"""

from __future__ import annotations

import argparse
import pstats
import sys
import time
from cProfile import Profile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from imagenet_fast.bench.train_step import alone, our_step, step_recipe, synthetic_batches

_WARMUP_STEPS = 5


def main() -> None:
    """Time and profile the steps, and print the functions that take longest by themselves."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--model", default="resnet50")
    options.add_argument("--image-size", type=int, default=224)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--sync", default="lazy")
    chosen = options.parse_args()
    recipe = step_recipe(chosen.model, chosen.image_size, chosen.batch, "bf16", compiled=False, sync=chosen.sync)
    world = alone()
    take_step, batches = our_step(recipe, world), synthetic_batches(recipe, world.device)

    def seconds_of(count: int) -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            take_step(batches, recipe.optim.lr)
        return time.perf_counter() - begun

    with torch.autograd.set_multithreading_enabled(False):
        seconds_of(_WARMUP_STEPS)
        print(f"a step of {chosen.sync} takes the host {1e3 * seconds_of(chosen.steps) / chosen.steps:.1f} ms")
        with Profile() as profile:
            seconds_of(chosen.steps)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
