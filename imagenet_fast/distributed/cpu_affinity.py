"""Count the processors that this process may use, and keep it to those of its GPU's NUMA node."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_fast.distributed.cgroup_limits import cpu_quotas
from imagenet_fast.distributed.rank_info import RankInfo

if TYPE_CHECKING:  # the command line counts cores, too, and starts without torch
    import torch
    from torch._C._distributed_c10d import Store


def usable_cores(root: Path = Path("/")) -> int:
    """Return the smallest processor count that CPU affinity or a cgroup allows, at least 1.

    Affinity is set by ``taskset`` or SLURM, cgroups by containers or systemd. A cgroup's limit is a share of CPU time,
    rounded up to whole processors. The limits of enclosing cgroups hold too.

    Args:
        root: Root of the file system with ``proc`` and ``sys``.
    """
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    counts += [math.ceil(quota) for quota in cpu_quotas(root)]
    return max(1, min(counts))


def cores_per_rank(ranks: int) -> int:
    """Return how many of the usable processors each of ``ranks`` gets if they share them evenly, at least 1."""
    return max(1, usable_cores() // ranks)


def own_cores(place: RankInfo, store: Store) -> int:
    """Return how many of its node's processors are for this rank. All ranks of the node must call this.

    A core is divided among the ranks that may use it. If srun or NUMA binding has given each rank cores of its own, the
    rank gets all of them. A cgroup's limit is divided evenly among the ranks of the node.
    """
    node = os.environ.get("GROUP_RANK", str(place.rank // place.local_size))  # srun may deal ranks out in turn
    store.set(f"cores/{node}/{place.local_rank}", json.dumps(sorted(os.sched_getaffinity(0))))
    allowed = [set(json.loads(store.get(f"cores/{node}/{other}"))) for other in range(place.local_size)]
    share = shares(allowed)[place.local_rank]
    return max(1, min([share, *(math.ceil(quota) // place.local_size for quota in cpu_quotas())]))


def shares(allowed: Sequence[set[int]]) -> list[int]:
    """Return the number of processors for each rank of a node, from the cores that each may use."""
    users = {core: sum(core in cores for cores in allowed) for core in set().union(*allowed)}
    return [int(sum(Fraction(1, users[core]) for core in cores)) for cores in allowed]


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
    import torch

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
