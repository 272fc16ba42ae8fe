"""Start MPI ranks beside gloo's, by mpiexec, that time all-reduces on request.

There are as many MPI ranks as gloo ranks. The settings are for MPICH with UCX, which the `mpich` wheel contains. By
default it connects ranks of one node by shared memory, which bypasses a shaped link. On a simulated network it is
therefore configured so that no two ranks share a node, with a fixed interface. A trial all-reduce then checks that the
link has carried the bytes.

A rank is this module itself, so it imports no torch:

    mpiexec -n RANKS python -m imagenet_fast.bench.mpi FOLDER RANKS_EACH [NAMESPACE ...]

It listens on the socket FOLDER/RANK and serves one caller after another; all ranks must receive the same requests.
Between requests it sleeps, because waiting inside MPI would keep a core busy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from imagenet_fast.bench.netns import INTERFACE, Host, fill_unevenly, inhabit, kill_with_parent, time_repetitions
from imagenet_fast.errors import UserError

INSTALL = "`pip install mpi4py mpich`"

_START_S = 60.0
_TRIED_ELEMENTS = 2**14  # 64 KiB, against which the bytes of barriers are negligible
_BY_LINK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": INTERFACE}
# Ignore a batch system's settings, which would start the ranks elsewhere.
_HERE = ["-rmk", "user", "-launcher", "fork"]


def lacking() -> str | None:
    """Return the part of MPI that is not installed (``mpi4py`` or ``mpiexec``), or None."""
    if find_spec("mpi4py") is None:
        return "mpi4py"
    return "mpiexec" if _mpiexec() is None else None


@contextmanager
def mpi_ranks(hosts: list[Host] | None, ranks_each: int) -> Iterator[Path]:
    """Start MPI ranks, and stop them at exit.

    Args:
        hosts: Nodes of a shaped network; None means this node.
        ranks_each: Ranks on each node.

    Yields:
        The directory of their sockets, for ``call``.

    Raises:
        UserError: The ranks do not start, end too early, or do not send over the links of their nodes.
    """
    mpiexec = _mpiexec()
    assert mpiexec is not None
    count = ranks_each * (1 if hosts is None else len(hosts))
    module = [sys.executable, "-m", "imagenet_fast.bench.mpi"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as kept:
        folder, said = Path(place), Path(place) / "said"
        process = subprocess.Popen(
            [mpiexec, *_HERE, "-n", str(count), *module, place, str(ranks_each), *(h.namespace for h in hosts or ())],
            env=os.environ | (_BY_LINK if hosts is not None else {}),
            stdin=subprocess.DEVNULL, stdout=kept.enter_context(said.open("wb")), stderr=subprocess.STDOUT,
            preexec_fn=kill_with_parent, process_group=0,
        )  # fmt: skip
        kept.callback(_end, process)
        try:
            sent = _try(folder, count, process)
            if hosts is not None and len(hosts) > 1 and min(sent) < 4 * _TRIED_ELEMENTS:
                raise UserError(
                    f"the links carry {min(sent):.0f} of the {4 * _TRIED_ELEMENTS} bytes that an MPI rank has to send, "
                    "so its ranks talk past them; install the mpich wheel beside mpi4py, or leave mpi out"
                )
            yield folder
        except UserError:
            raise
        except Exception as error:  # maybe the caller's, from a broken connection
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if process.returncode is None:
                raise
            raise UserError(f"MPI's ranks have ended {_last_words(said)}; mend that, or leave mpi out") from error


def call(folder: Path, rank: int) -> Connection:
    """Connect to an MPI rank that times all-reduces.

    Send ``(elements, times, checked)``: the number of fp32 values, the number of all-reduces, and whether to check the
    sum. The rank replies with seconds per all-reduce, and bytes per all-reduce on its node's link. All ranks must
    receive the same requests.
    """
    return Client(str(folder / str(rank)), "AF_UNIX")


def _mpiexec() -> str | None:
    """Return the path of mpiexec: this Python environment's, else one on PATH, else None."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")


def _try(folder: Path, count: int, process: subprocess.Popen[bytes]) -> list[float]:
    """Run an all-reduce of ``_TRIED_ELEMENTS`` values, and return by rank the bytes on its node's link."""
    deadline = time.monotonic() + _START_S
    with ExitStack() as kept:
        lines = [kept.enter_context(_call_soon(folder, rank, process, deadline)) for rank in range(count)]
        for line in lines:
            line.send((_TRIED_ELEMENTS, 1, True))
        for line in lines:
            if not line.poll(max(0.0, deadline - time.monotonic())):
                raise UserError(f"MPI's ranks have not come together in {_START_S:.0f} s; leave mpi out")
        return [line.recv()[1] for line in lines]


def _call_soon(folder: Path, rank: int, process: subprocess.Popen[bytes], deadline: float) -> Connection:
    """Connect to an MPI rank once it listens."""
    while True:
        try:
            return call(folder, rank)
        except (FileNotFoundError, ConnectionRefusedError):
            if process.poll() is not None:
                raise
            if time.monotonic() > deadline:
                raise UserError(f"MPI's ranks have not started in {_START_S:.0f} s; leave mpi out") from None
            time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpiexec, which ends its ranks; they also end if it is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(said: Path) -> str:
    """Describe the last line that the ranks printed before mpiexec's own error report."""
    own, *_ = said.read_text(errors="replace", encoding="utf-8").partition("\n=====")
    lines = [line.strip() for line in own.splitlines() if line.strip() and "MPI_Abort" not in line]
    return f"with {lines[-1]!r}" if lines else "without a word"


def serve(folder: Path, ranks_each: int, namespaces: list[str]) -> None:
    """Serve requests until the process is ended.

    Args:
        folder: Directory of the sockets.
        ranks_each: Ranks on each node.
        namespaces: Paths of the nodes' network namespaces; empty means this node's own network.
    """
    kill_with_parent()
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
        message, expected = np.empty((2, elements), np.float32)
        if checked:
            fill_unevenly(message, ranks.rank + 1)
            fill_unevenly(expected, ranks.size * (ranks.size + 1) / 2)
            ranks.Allreduce(mpi.IN_PLACE, message)
            assert (message == expected).all(), "MPI's sum is not that of the ranks"
        message.fill(0)  # repeated sums of zeros stay finite
        caller.send(
            time_repetitions(lambda: ranks.Allreduce(mpi.IN_PLACE, message), times, ranks.Barrier, counted=counted)  # noqa: B023
        )


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
