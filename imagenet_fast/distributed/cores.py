"""The share of its node that this process may use: cores, memory, threads and files, by affinity, NUMA and cgroups.

A ``root`` is that of the file system with the kernel's ``proc`` and ``sys``.
"""

from __future__ import annotations

import gc
import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # the command line counts cores, too, and starts without torch
    import torch


def usable_cores(root: Path = Path("/")) -> int:
    """Return the smallest processor count that CPU affinity, a cgroup or srun allows, at least 1.

    Affinity is set by ``taskset`` or SLURM, cgroups by containers or systemd. A cgroup's limit is a share of CPU time,
    rounded up to whole processors. The limits of enclosing cgroups hold too.
    """
    allowed = len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in cpu_quotas(root))
    return max(1, min(*allowed, task_cores() or allowed[0]))


def task_cores() -> int | None:
    """Return the processors that srun gave to this task, which Slurm need not confine to them; None if it does not say.

    In a batch script, or a shell of ``srun --pty``, the variable is about tasks that are still to be started.
    """
    is_task = "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PTY_PORT" not in os.environ
    return int(os.environ.get("SLURM_CPUS_PER_TASK") or 0) or None if is_task else None


def cores_per_rank(ranks: int) -> int:
    """Return how many of the usable processors each of ``ranks`` gets if they share them evenly, at least 1."""
    return max(1, usable_cores() // ranks)


def cpu_quotas(root: Path = Path("/")) -> list[float]:
    """Return the processors that each cgroup of this process allows; none for a cgroup without a limit."""
    quotas = []
    for folder in _cgroups(root):
        with suppress(OSError, ValueError):  # without the controller, or without a limit: "max"
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            quotas.append(float(limit) / float(period))
    return quotas


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may still use, by the node and by its cgroups."""
    left = [int(psutil.virtual_memory().available)]
    for folder in _cgroups(root):
        with suppress(OSError, ValueError):  # without the controller, or without a limit: "max"
            most, used = (int((folder / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
            lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            cached = int(dict(line.split() for line in lines).get("inactive_file", 0))  # which the kernel would give up
            left.append(max(0, most - used + cached))
    return min(left)


def exceeded_limit(message: str) -> str:
    """Return, by the message of an error, which limit of this process was exceeded and how to raise it; empty if none.

    Backends report what the system refuses as errors of the connection.
    """
    if "Resource temporarily unavailable" in message or "can't start new thread" in message:
        return "no more processes and threads may be started; raise `ulimit -u`, or the container's limit (`pids.max`)"
    if "Too many open files" in message:
        return f"no more files may be opened; raise `ulimit -n` (now {resource.getrlimit(resource.RLIMIT_NOFILE)[1]})"
    return ""


def raise_open_files() -> None:
    """Let this process open as many files as it may: a data set has many, and a store two connections to each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def freeze_gc() -> None:
    """Exclude all objects that are alive now from future garbage collections.

    torch and a model are about half a million objects; a collection of all of them takes 0.1 to 0.4 s. Each rank would
    run it in a different step, in which all others wait. Objects created later are still collected, in little time.
    """
    gc.collect()
    gc.freeze()


def bind_to_numa_node(gpu: torch.device, root: Path = Path("/")) -> None:
    """Bind this thread, and all that it starts from now on, to the allowed cores next to ``gpu``, if any are known.

    Memory that they touch first is then on that NUMA node too. torchrun's ``--numa-binding=node`` does the same, but
    needs numactl, and a torchrun of our own.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(gpu)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = int((root / f"sys/bus/pci/devices/{place}/numa_node").read_text(encoding="utf-8"))
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="utf-8")  # node -1: unknown
        ranges = [part.partition("-") for part in listed.strip().split(",")]  # of "0-2,8"
        cores = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return
    if here := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, here)


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folder of this process's cgroup, of version 2, and of those around it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                mount = root / "sys/fs/cgroup"
                group = mount / line.removeprefix("0::").strip("/")
                # In a container the path may be that of the host, where only the mount's own group is visible.
                yield from (group, *(folder for folder in group.parents if folder.is_relative_to(mount)))
