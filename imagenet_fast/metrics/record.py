"""Begin the record of a run: its directory, what its result depends on, and the sinks of its events."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import distributions

import torch
import torch.distributed as dist

from imagenet_fast import __version__
from imagenet_fast.atomic_io import atomic_write_text, to_json
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.versions import commit
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.events import MetricLogger, take_back
from imagenet_fast.recipe.job import Job, write_job
from imagenet_fast.recipe.load import to_toml
from imagenet_fast.run.run_dir import RunDir


def open_record(job: Job, world: DistContext, run_s: Callable[[], float], resumed: int | None = None) -> MetricLogger:
    """Create the run directory, record job, recipe and environment, and open every sink; on rank 0 only.

    Other ranks get a logger without sinks.

    Args:
        job: What is trained, and the run directory.
        world: The ranks.
        run_s: Returns the seconds since the run began.
        resumed: The step from which the run resumes; later records are removed. None: the run begins.

    Raises:
        UserError: A file cannot be written, for example because a directory has its name.
    """
    if not world.is_main:
        return MetricLogger(run_s)
    from imagenet_fast.metrics.console import ConsoleSink  # imported here, since both take half a second
    from imagenet_fast.metrics.tensorboard import TensorBoard

    run = RunDir(job.folder)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(run.environment, to_json(environment(job, world), indent=2) + "\n")
        atomic_write_text(run.recipe, to_toml(job.recipe))
        past = [] if resumed is None else take_back(run.folder, resumed)
        run.outcome.unlink(missing_ok=True)
        write_job(job, run.job)  # last: with the outcome of another job it would be taken for a run that has ended
        return MetricLogger(run_s, [TensorBoard(job, resumed, past), ConsoleSink(run.folder, past)], run.folder)
    except OSError as error:
        raise UserError(
            f"{error.filename or run.folder} cannot be written ({error.strerror}); see to that, or restore it"
        ) from None


def environment(job: Job, world: DistContext) -> dict[str, object]:
    """Return what a result depends on besides the recipe.

    That is versions, hardware, and the environment variables that affect torch and NCCL.
    """
    packages = ("torch", "torchvision", "nvidia-dali-cuda130", "numpy")
    steering = ("OMP_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "MASTER_")
    return {
        "imagenet_fast": __version__,
        "commit": commit(),
        "command": job.command,
        "python": platform.python_version(),
        "packages": {name: found.version for name in packages for found in distributions(name=name)},
        "host": platform.node(),
        "system": platform.platform(),
        "cores": usable_cores(),
        "ranks": world.size,
        # By its class: torch's name "nccl" denotes another one since 2.15.
        "backend": type(dist.distributed_c10d._get_default_group()._get_backend(world.device)).__name__,
        "bf16": world.bf16,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "variables": {key: value for key, value in os.environ.items() if key.startswith(steering)},
    }
