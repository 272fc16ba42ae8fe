"""Rank and world size of this process, from the environment variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from imagenet_fast.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables by which torchrun gives a process its rank.

torchrun also sets ``GROUP_RANK``, the number of its node.
"""

_RUNS = 6  # of consecutive ranks that are listed


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


def set_group_rank(place: RankInfo, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set ``GROUP_RANK`` if neither torchrun nor srun started this rank, but an mpirun or a script.

    This assumes that all nodes have the same number of ranks, and that the ranks of a node are consecutive, as with
    torchrun.
    """
    environment.setdefault("GROUP_RANK", str(place.rank // place.local_size))


def rank_info_from_env() -> RankInfo | None:
    """Return this process's rank from the environment, or None if it was not started as one of several ranks.

    Raises:
        UserError: If a variable is no whole number or out of range, or only some are set, as by a pod's
            ``WORLD_SIZE``. Each such process would train alone, with the whole batch.
    """
    found = {key: os.environ[key] for key in TORCHRUN if key in os.environ}
    if len(found) == len(TORCHRUN):
        given = ", ".join(f"{key}={value}" for key, value in found.items())
        try:
            place = RankInfo(*(int(found[key]) for key in TORCHRUN))
        except ValueError:
            raise UserError(f"the environment says {given}, which are not all whole numbers; correct them") from None
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
