"""Read the limits that cgroups, as of containers, Slurm or systemd, set for this process; raise its limit of files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of the limit and of the use in bytes, and the word for reclaimable cache, in versions 2 and 1."""


def raise_open_files() -> None:
    """Let this process open as many files as it may: by default it is 1024, and a data set may have as many shards."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_quotas(root: Path = Path("/")) -> list[float]:
    """Return the processors that each cgroup of this process allows; none for a cgroup without a limit.

    Args:
        root: Root of the file system with ``proc`` and ``sys``.
    """
    return [quota for folder in _cgroups(root, "cpu") if (quota := _quota(folder)) is not None]


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may still use, by the node and by its cgroups.

    Args:
        root: Root of the file system with ``proc`` and ``sys``.
    """
    left = [int(psutil.virtual_memory().available)]
    for folder in _cgroups(root, "memory"):
        for limit, use, cache in _MEMORY:
            with suppress(OSError, ValueError):  # of the other version, or without a limit: "max"
                most, used = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, use))
                lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                left.append(max(0, most - used + int(dict(line.split() for line in lines).get(cache, 0))))
    return min(left)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups (version 1 or 2) with ``controller``, and of those around them."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.strip("/")
        # In a container the path may be that of the host, where only the mount's own group is visible.
        for folder in (group, *group.parents):
            yield folder
            if folder == mount:
                break


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
