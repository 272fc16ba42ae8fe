"""MPI's ranks beside gloo's: as many processes more, started by mpiexec, that can be asked to time an all-reduce.

The settings are MPICH's with UCX, which is what the `mpich` wheel is. Left to itself it joins ranks of one machine by
shared memory, past a shaped link: on hosts of a network of one's own it is told that no two ranks share a machine, and
which interface to take; and then it is seen whether the link has carried the bytes.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from pathlib import Path

from imagenet_fast.bench.netns import INTERFACE, Host, end_with_parent
from imagenet_fast.errors import UserError

INSTALL = "`pip install mpi4py mpich`"

_START_S = 60.0
_TRIED_ELEMENTS = 2**14  # 64 KiB, beside which barriers weigh nothing
_BY_LINK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": INTERFACE}
# Not by what a batch system has set, which would start them elsewhere.
_HERE = ["-rmk", "user", "-launcher", "fork"]


def lacking() -> str | None:
    """Which part of MPI is not installed, if any."""
    if find_spec("mpi4py") is None:
        return "mpi4py"
    return "mpiexec" if _mpiexec() is None else None


@contextmanager
def mpi_ranks(hosts: list[Host] | None, ranks_each: int) -> Iterator[Path]:
    """``ranks_each`` MPI ranks on each of ``hosts``, or else on this machine; the directory where :func:`call` finds
    them.

    Raises UserError where they do not start, end before their time, or do not send over the links of their hosts.
    """
    mpiexec = _mpiexec()
    assert mpiexec is not None
    count = ranks_each * (1 if hosts is None else len(hosts))
    module = [sys.executable, "-m", "imagenet_fast.bench.mpi_rank"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as kept:
        folder, said = Path(place), Path(place) / "said"
        process = subprocess.Popen(
            [mpiexec, *_HERE, "-n", str(count), *module, place, str(ranks_each), *(h.namespace for h in hosts or ())],
            env=os.environ | (_BY_LINK if hosts is not None else {}),
            stdin=subprocess.DEVNULL, stdout=kept.enter_context(said.open("wb")), stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent, process_group=0,
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
        except Exception as error:  # of a caller, maybe, whose line has broken
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if process.returncode is None:
                raise
            raise UserError(f"MPI's ranks have ended {_last_words(said)}; mend that, or leave mpi out") from error


def call(folder: Path, rank: int) -> Connection:
    """A line to an MPI rank: to ``(elements, times, checked)`` it answers with seconds and bytes on its host's link of
    one of so many all-reduces of fp32 values. ``checked``: it looks at their sum. All ranks must be asked alike."""
    return Client(str(folder / str(rank)), "AF_UNIX")


def _mpiexec() -> str | None:
    """That of the environment we run in, or else any."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")


def _try(folder: Path, count: int, process: subprocess.Popen[bytes]) -> list[float]:
    """Bytes that the hosts' links have carried of an all-reduce of ``_TRIED_ELEMENTS``, by rank."""
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
    """mpiexec ends its ranks, and they end with it however it ends."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(said: Path) -> str:
    """With what they ended, before mpiexec began to tell of it."""
    own, *_ = said.read_text(errors="replace", encoding="utf-8").partition("\n=====")
    lines = [line.strip() for line in own.splitlines() if line.strip() and "MPI_Abort" not in line]
    return f"with {lines[-1]!r}" if lines else "without a word"
