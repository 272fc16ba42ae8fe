"""Translate srun's description of a job step into torchrun's variables.

    srun --nodes 64 --ntasks-per-node 8 imagenet-fast train ...     a task is a rank
    srun --nodes 64 --ntasks-per-node 1 imagenet-fast train ...     a task starts its node's ranks

The variables are srun's output environment (https://slurm.schedmd.com/srun.html). A batch script that srun has not
started does not have them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from imagenet_fast.distributed.cpu_affinity import cores_per_rank
from imagenet_fast.distributed.rank_info import TORCHRUN, RankInfo
from imagenet_fast.errors import UserError

_FIRST_PORT, _PORTS = 20_000, 10_000


def adopt_step(environment: MutableMapping[str, str], chosen: bool = False, one_a_node: bool = False) -> None:
    """Set torchrun's variables, unless set, if srun has started several tasks on a node: each task is a rank.

    Args:
        environment: The variables of this process.
        chosen: Whether the user says how many ranks to start here. Then the shell of ``srun --pty`` is no task.
        one_a_node: Whether a task is a rank even where each node has one, which otherwise starts its node's ranks.

    Raises:
        UserError: This is the shell of ``srun --pty``, without which the other tasks have ended; or srun's variables
            do not agree.
    """
    if any(key in environment for key in TORCHRUN) or not _is_step(environment):
        return
    if _is_shell(environment):
        if not chosen:
            raise UserError(
                f"srun --pty has started {environment['SLURM_STEP_NUM_TASKS']} tasks, of which only this one has a "
                "shell; give --nproc and --nodes 1 to start ranks here, or use srun without --pty: its tasks are ranks"
            )
        del environment["SLURM_STEP_NUM_TASKS"]
        return
    tasks = _tasks_by_node(environment)
    if max(tasks) == 1 and not one_a_node:
        return
    node = int(environment["SLURM_NODEID"])
    here = tasks[node]
    rank, size, local_rank = (int(environment[f"SLURM_{key}"]) for key in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
    environment.update(RankInfo(rank, size, local_rank, here).variables(node))
    environment.setdefault("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_port(environment)))
    cores = int(environment.get("SLURM_CPUS_PER_TASK") or cores_per_rank(here))
    environment.setdefault("OMP_NUM_THREADS", str(cores))


def _is_shell(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in the shell of ``srun --pty``, whose variables its own steps have, too.

    Tasks of those steps have no terminal.
    """
    return "SLURM_PTY_PORT" in environment and environment["SLURM_PROCID"] == "0" and _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def step_nodes(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the number of nodes and where to meet if srun started one task on each of several nodes, else None.

    Raises:
        UserError: srun's variables do not agree.
    """
    if not _is_step(environment) or max(_tasks_by_node(environment)) > 1:
        return None
    first = _first_host(environment["SLURM_STEP_NODELIST"])
    return int(environment["SLURM_STEP_NUM_TASKS"]), f"{first}:{_port(environment)}"


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and all(key in environment for key in needed)


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """Return each node's number of tasks: 8, 8, 4 for ``8(x2),4``. Raises UserError if this task is none of them."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    keys = ("STEP_NUM_TASKS", "PROCID", "NODEID", "LOCALID")
    size, rank, node, local_rank = (int(environment[f"SLURM_{key}"]) for key in keys)
    if sum(counts) != size or rank >= size or node >= len(counts) or local_rank >= counts[node]:
        told = ", ".join(f"SLURM_{key}={environment[f'SLURM_{key}']}" for key in ("STEP_TASKS_PER_NODE", *keys))
        raise UserError(
            f"srun's variables do not agree ({told}), as in a heterogeneous step; start one component of it alone"
        )
    return counts


def _first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: rack1-node07 for ``rack[1-2]-node[07,09-12],login``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) if first else nodes


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that another job step on the same nodes is unlikely to use."""
    job, step = (int(environment.get(f"SLURM_{key}_ID", "0")) for key in ("JOB", "STEP"))
    return _FIRST_PORT + (job + 101 * step) % _PORTS
