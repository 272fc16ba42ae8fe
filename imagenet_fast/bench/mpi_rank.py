"""Run one MPI rank that times all-reduces on request; ``imagenet_fast.bench.mpi`` starts it by mpiexec.

    mpiexec -n RANKS python -m imagenet_fast.bench.mpi_rank FOLDER RANKS_EACH [NAMESPACE ...]

It listens on the socket FOLDER/RANK and serves one caller after another; all ranks must receive the same requests.
Between requests it sleeps, because waiting inside MPI would keep a core busy.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from imagenet_fast.bench.netns import Host, end_with_parent, inhabit
from imagenet_fast.bench.repetitions import time_repetitions


def main(folder: Path, ranks_each: int, namespaces: list[str]) -> None:
    """Serve requests until the process is ended.

    Args:
        folder: Directory of the sockets.
        ranks_each: Ranks on each node.
        namespaces: Paths of the nodes' network namespaces; empty means this node's own network.
    """
    end_with_parent()
    rank = int(os.environ["PMI_RANK"])  # MPI reports the rank too late: it looks for interfaces when it starts
    if namespaces:
        inhabit(Host("", namespaces[rank // ranks_each]))
    from mpi4py import MPI

    try:
        with Listener(str(folder / str(rank)), "AF_UNIX") as listener:
            while True:
                with listener.accept() as caller:
                    _answer(caller, MPI, counted=bool(namespaces))
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)  # else the other ranks would wait for this one


def _answer(caller: Connection, mpi: Any, counted: bool) -> None:
    """Reply to each ``(elements, times, checked)`` with seconds and bytes on the node's link.

    Return when the caller has disconnected.
    """
    import numpy as np

    ranks = mpi.COMM_WORLD
    while True:
        try:
            elements, times, checked = caller.recv()
        except (EOFError, ConnectionError):
            return
        message = np.ones(elements, np.float32)
        if checked:
            ranks.Allreduce(mpi.IN_PLACE, message)
            assert (message == ranks.size).all(), "MPI's sum is not that of the ranks"
        message.fill(0)  # repeated sums of zeros stay finite
        caller.send(
            time_repetitions(lambda: ranks.Allreduce(mpi.IN_PLACE, message), times, ranks.Barrier, counted=counted)  # noqa: B023
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
