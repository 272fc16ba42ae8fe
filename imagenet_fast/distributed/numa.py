"""Bind a rank to the NUMA node of its GPU: copies and launches across sockets cost a few per cent of a step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def bind_to_numa_node(gpu: torch.device, root: Path = Path("/")) -> set[int]:
    """Bind this process, its threads and its later children to the allowed cores next to ``gpu``.

    Memory that the process touches first is then on that NUMA node too. torchrun's ``--numa-binding=node`` does the
    same, but needs numactl, and a torchrun of our own.

    Args:
        gpu: CUDA device of this rank.
        root: Root of the file system with ``sys``.

    Returns:
        The cores. An empty set, with nothing changed, if the kernel does not report them or this process may use none
        of them.
    """
    properties: Any = torch.cuda.get_device_properties(gpu)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    try:
        node = int((root / f"sys/bus/pci/devices/{place}/numa_node").read_text(encoding="utf-8"))
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="utf-8")  # node -1: unknown
        cores = _cores_in(listed) & allowed
    except (OSError, ValueError):
        return set()
    if cores:
        for thread in (int(path.name) for path in Path("/proc/self/task").iterdir()):
            with suppress(OSError):  # the thread has ended
                if os.sched_getaffinity(thread) == allowed:  # not a thread that was bound before
                    os.sched_setaffinity(thread, cores)
    return cores


def _cores_in(listed: str) -> set[int]:
    """Parse a kernel list of cores: "0-2,8" as 0, 1, 2, 8."""
    ranges = [part.partition("-") for part in listed.strip().split(",")]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
