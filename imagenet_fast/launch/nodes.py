"""Which nodes and ranks a command asks for, and where they meet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from threading import Event, Thread

from imagenet_fast.distributed.cores import exceeded_limit, usable_memory
from imagenet_fast.distributed.network import Endpoint, parse_endpoint
from imagenet_fast.distributed.ranks import refuse_mpirun, step_nodes
from imagenet_fast.errors import UserError
from imagenet_fast.netlab.namespaces import Host

_RANK_BYTES = 150 * 2**20  # memory that a rank takes at least, with torch loaded
_RESTARTS = 10  # if nodes may leave: each one that does uses up a restart


@dataclass(frozen=True)
class LaunchConfig:
    """Number of nodes and of ranks per node, and where and how long the nodes wait for one another."""

    ranks_each: int
    count: int = 1
    """Number of nodes; the maximum if it may vary."""
    endpoint: Endpoint | None = None
    join_timeout_s: float = 300.0
    restarts: int = 0
    """The number of times that torchrun restarts the ranks after one was lost."""
    least: int | None = None
    """Minimum number of nodes if they may leave and join; None if there are always ``count``."""
    hosts: tuple[Host, ...] = ()
    """Simulated nodes, one for each rank here; empty: ranks are on this node itself."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes; the maximum if it may vary."""
        return self.count * self.ranks_each

    @property
    def counts(self) -> range | None:
        """Possible numbers of nodes; None if the number is fixed."""
        return None if self.least is None else range(self.least, self.count + 1)


def resolve_nodes(
    nproc: int | None, asked: str | int | None, endpoint: str | None, join_timeout_s: float, restarts: int | None = None
) -> LaunchConfig:
    """Build the launch configuration that the command line asks for.

    Without ``asked``, a number of nodes or a range like ``2:4``, they are those that srun has started, or one. Without
    ``endpoint`` they meet at the first of srun's.

    Raises:
        UserError: If an option is invalid, or an endpoint is missing.
    """
    least, count = parse_nodes("1" if asked is None else str(asked))
    if asked is None and (step := step_nodes()) is not None:
        count, endpoint = step[0], endpoint or step[1]
    elif asked is None:
        refuse_mpirun()
    if (count > 1 or least is not None) and endpoint is None:
        raise UserError(f"--nodes {asked} needs --rdzv-endpoint HOST:PORT, the same on every node")
    meeting_place = parse_endpoint(endpoint) if endpoint is not None else None
    if restarts is None:
        restarts = 0 if least is None else _RESTARTS
    return LaunchConfig(local_ranks(nproc), count, meeting_place, join_timeout_s, restarts, least)


def parse_nodes(asked: str) -> tuple[int | None, int]:
    """Return minimum and maximum of ``2:4``, or None and 4 for ``4``. Raises UserError."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", asked)
    least, most = found.groups() if found else (None, "0")
    if int(most) < 1 or (least is not None and not 1 <= int(least) <= int(most)):
        raise UserError(f"--nodes {asked} is no number of nodes, and no range of them; write for example 4 or 2:4")
    return None if least is None else int(least), int(most)


def local_ranks(asked: int | None) -> int:
    """Return ``asked`` ranks; if None, one per GPU, or two without GPUs.

    Raises:
        UserError: There are more ranks than GPUs, or than fit into memory.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise UserError(f"--nproc {asked} is more than this node's {gpus} GPU(s); use at most {gpus}")
    if asked is not None and asked * _RANK_BYTES > (free := usable_memory()):
        raise UserError(
            f"--nproc {asked} takes more than {asked * _RANK_BYTES / 2**30:.0f} GiB of memory, and "
            f"{free / 2**30:.0f} GiB are free; give at most {max(1, free // _RANK_BYTES)}"
        )
    return asked or gpus or 2


def refused_threads(count: int) -> str:
    """Return which limit does not let this process start ``count`` threads at once, as ``exceeded_limit``."""
    over = Event()
    try:
        for _ in range(count):
            Thread(target=over.wait, daemon=True).start()
        return ""
    except RuntimeError as error:
        return exceeded_limit(str(error))
    finally:
        over.set()
