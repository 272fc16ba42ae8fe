"""One rank of MPI, started by mpiexec (:mod:`imagenet_fast.bench.mpi`): times all-reduces for who asks it.

    mpiexec -n RANKS python -m imagenet_fast.bench.mpi_rank FOLDER RANKS_EACH [NAMESPACE ...]

It listens at the socket FOLDER/RANK, to one caller after another; all ranks must be asked for the same. In between it
sleeps: waiting inside MPI would keep a core busy.
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
    """Serve until the process is ended."""
    end_with_parent()
    rank = int(os.environ["PMI_RANK"])  # MPI itself would say so too late: it looks for interfaces as it begins
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
        MPI.COMM_WORLD.Abort(1)  # the other ranks would wait for this one


def _answer(caller: Connection, mpi: Any, counted: bool) -> None:
    """For each ``(elements, times, checked)``, seconds and bytes on the host's link, until the caller has gone."""
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
        message.fill(0)  # of which sums stay finite
        caller.send(
            time_repetitions(lambda: ranks.Allreduce(mpi.IN_PLACE, message), times, ranks.Barrier, counted=counted)  # noqa: B023
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
