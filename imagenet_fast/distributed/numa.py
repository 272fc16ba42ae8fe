"""A rank and its GPU on one NUMA node: copies and launches that cross sockets cost some per cent of a step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def bind_to_numa_node(gpu: torch.device, root: Path = Path("/")) -> set[int]:
    """Keep this process, its threads and what it will start to the cores beside ``gpu``, of those that it may use.

    Memory that it touches first is then of that node too. torchrun's ``--numa-binding=node`` does the same, but needs
    numactl, and a torchrun of our own.

    Returns:
        The cores; none, and nothing is changed, where the kernel does not tell which they are or all are others'.
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
            with suppress(OSError):  # it has ended
                if os.sched_getaffinity(thread) == allowed:  # not one that somebody has bound
                    os.sched_setaffinity(thread, cores)
    return cores


def _cores_in(listed: str) -> set[int]:
    """0-2,8 as 0, 1, 2, 8."""
    ranges = [part.partition("-") for part in listed.strip().split(",")]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
