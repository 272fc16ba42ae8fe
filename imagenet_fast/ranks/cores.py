"""How many processors this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The fewest that affinity (``taskset``, SLURM) and cgroups (containers, systemd) allow, and at least 1.

    A cgroup's limit is a share of time, rounded up to whole processors; those of the groups around it hold too.
    """
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    counts += [math.ceil(quota) for quota in _quotas(root)]
    return max(1, min(counts))


def _quotas(root: Path) -> list[float]:
    """Processors allowed by each cgroup that this process is in, of either version."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.strip("/")
        # In a container the path may be the host's, of which only the mount's own group is to be seen.
        for folder in (group, *group.parents):
            if (quota := _quota(folder)) is not None:
                found.append(quota)
            if folder == mount:
                break
    return found


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
            )
        return None if limit in ("max", "-1") else float(limit) / float(period)
    except (OSError, ValueError):
        return None
