"""Rank and world size of this process, from the variables that torchrun sets, or from srun's description of a job step.

    srun --nodes 64 --ntasks-per-node 8 imagenet-fast train ...     a task is a rank
    srun --nodes 64 --ntasks-per-node 1 imagenet-fast train ...     a task starts its node's ranks

The latter are srun's output environment (https://slurm.schedmd.com/srun.html). A batch script that srun has not started
does not have them.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from imagenet_fast.distributed.cores import cores_per_rank
from imagenet_fast.errors import UserError

_libc = ctypes.CDLL(None)  # loaded here: `kill_with_parent` may be called between fork and exec

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which torchrun gives a process its rank. It also sets ``GROUP_RANK``, the number of its node."""

_RUNS = 6  # of consecutive ranks that are listed
_FIRST_PORT, _PORTS = 20_000, 10_000


@dataclass(frozen=True)
class RankInfo:
    """One process among ``size``, of which ``local_size`` are on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self, node: int) -> dict[str, str]:
        """Return the variables that torchrun sets for a process with this rank on node number ``node``."""
        own = zip(TORCHRUN, (self.rank, self.size, self.local_rank, self.local_size), strict=True)
        return {key: str(value) for key, value in own} | {"GROUP_RANK": str(node)}

    @property
    def is_multi_node(self) -> bool:
        """True if ranks run on more than one node."""
        return self.size > self.local_size

    @property
    def is_main(self) -> bool:
        """True if this rank writes the run's record."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True if this rank acts for its node."""
        return self.local_rank == 0


def rank_info_from_env() -> RankInfo | None:
    """Return this process's rank from the environment, or None if it was not started as one of several ranks.

    Raises:
        UserError: If a variable is no whole number or out of range, or only some are set, as by a pod's
            ``WORLD_SIZE``. Each such process would train alone, with the whole batch.
    """
    found = {key: os.environ[key] for key in TORCHRUN if key in os.environ}
    if len(found) == len(TORCHRUN):
        given = ", ".join(f"{key}={value}" for key, value in found.items())
        place = RankInfo(*(int(found[key]) if found[key].isdecimal() else -1 for key in TORCHRUN))
        if not (0 <= place.local_rank < place.local_size <= place.size and 0 <= place.rank < place.size):
            raise UserError(
                f"the environment says {given}, but ranks count from 0, to below WORLD_SIZE and on each node to below "
                "LOCAL_WORLD_SIZE, its number of ranks; correct them"
            )
        return place
    if found and any(value not in ("0", "1", "") for value in found.values()):
        there, missing = " and ".join(found), ", ".join(key for key in TORCHRUN if key not in found)
        raise UserError(
            f"the environment has {there} but not {missing}, so this process cannot know its rank; start it with "
            f"torchrun (or srun), or unset {there} to have it start ranks of its own"
        )
    return None


def refuse_mpirun() -> None:
    """Raise UserError if mpirun has started several of this process, of which each would train alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        count = os.environ.get(name, "1")
        if count not in ("0", "1", "") and count != os.environ.get("SLURM_STEP_NUM_TASKS"):  # else it was srun
            raise UserError(
                f"mpirun has started {count} of these ({name}), and each would train alone; start this command once a "
                "node, with --nodes, or use torchrun or srun, whose tasks are ranks"
            )


def ranges(numbers: Sequence[int]) -> str:
    """Format ``numbers`` as ranges: 1, 2, 3, 7 as "1-3, 7".

    If there are more than six ranges, the first six are followed by the number of the remaining ranks.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown, more = runs[:_RUNS], sum(run[-1] - run[0] + 1 for run in runs[_RUNS:])
    return ", ".join("-".join(map(str, run)) for run in shown) + (f" and {more} more" if more else "")


def srun_to_torchrun_env(environment: MutableMapping[str, str], chosen: bool = False, one_a_node: bool = False) -> None:
    """Set torchrun's variables, unless set, if srun has started several tasks on a node: each task is a rank.

    Args:
        environment: The variables of this process.
        chosen: Whether the user says how many ranks to start here. Then the shell of ``srun --pty`` is no task.
        one_a_node: Whether a task is a rank even where each node has one, which otherwise starts its node's ranks.

    Raises:
        UserError: This is the shell of ``srun --pty``, without which the other tasks have ended.
    """
    if any(key in environment for key in TORCHRUN) or not _is_step(environment):
        return
    # The shell of ``srun --pty`` has variables that its own steps have, too, whose tasks have no terminal.
    if "SLURM_PTY_PORT" in environment and environment["SLURM_PROCID"] == "0" and _has_terminal():
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


def is_task(rank: int, size: int) -> bool:
    """Return whether srun has started this rank as a task; else a task may have started several ranks."""
    return (os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_STEP_NUM_TASKS")) == (str(rank), str(size))


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def step_nodes(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the number of nodes and where to meet if srun started one task on each of several nodes, else None."""
    if not _is_step(environment) or max(_tasks_by_node(environment)) > 1:
        return None
    first = _first_host(environment["SLURM_STEP_NODELIST"])
    return int(environment["SLURM_STEP_NUM_TASKS"]), f"{first}:{_port(environment)}"


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and all(key in environment for key in needed)


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """Return each node's number of tasks: 8, 8, 4 for ``8(x2),4``."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: rack1-node07 for ``rack[1-2]-node[07,09-12],login``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) if first else nodes


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that another job step on the same nodes is unlikely to use."""
    job, step = (int(environment.get(f"SLURM_{key}_ID", "0")) for key in ("JOB", "STEP"))
    return _FIRST_PORT + (job + 101 * step) % _PORTS


def kill_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
