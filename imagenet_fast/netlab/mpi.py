"""Time MPI's all-reduces: ranks by mpiexec, on this node or on the nodes of a shaped network.

The settings are for MPICH with UCX, which the `mpich` wheel contains. By default it connects ranks of one node by
shared memory, which bypasses a shaped link. On a simulated network it is therefore configured so that no two ranks
share a node, with a fixed interface. A trial all-reduce then checks that the link has carried the bytes.

A rank is this module itself, so it imports no torch:

    mpiexec -n RANKS python -m imagenet_fast.netlab.mpi ARGUMENTS
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec

from imagenet_fast.distributed.ranks import kill_with_parent
from imagenet_fast.errors import UserError
from imagenet_fast.netlab.namespaces import INTERFACE, Host, inhabit
from imagenet_fast.netlab.timing import Block, Blocks, fill_unevenly, time_in_turns, time_repetitions

_START_S = 60
_TRIED_ELEMENTS = 2**14  # 64 KiB, against which the bytes of barriers are negligible
_BY_LINK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": INTERFACE}
# Ignore a batch system's settings, which would start the ranks elsewhere.
_HERE = ["-rmk", "user", "-launcher", "fork"]


def lacking() -> str | None:
    """Return the part of MPI that is not installed (``mpi4py``, its library or ``mpiexec``), or None."""
    try:
        find_spec("mpi4py.MPI")
    except ModuleNotFoundError:
        return "mpi4py"
    except RuntimeError:
        return "library of MPI"
    return "mpiexec" if _mpiexec() is None else None


def time_mpi(
    hosts: list[Host] | None, ranks_each: int, sizes: Sequence[int], rounds: int, block_s: float
) -> list[Blocks]:
    """Time MPI's all-reduces of fp32 values as ``time_in_turns`` does.

    Args:
        hosts: Nodes of a shaped network; None means this node.
        ranks_each: Ranks on each node.
        sizes: Message sizes in bytes.
        rounds: Number of rounds.
        block_s: Seconds for which each all-reduce is repeated in a round, approximately.

    Returns:
        The blocks of each rank, of the name "mpi".

    Raises:
        UserError: The ranks do not start, end too early, or do not send over the links of their nodes.
    """
    mpiexec = _mpiexec()
    assert mpiexec is not None, "MPI is not installed"
    count = ranks_each * (1 if hosts is None else len(hosts))
    asked = json.dumps([ranks_each, [host.namespace for host in hosts or ()], list(sizes), rounds, block_s])
    done = subprocess.run(
        [mpiexec, *_HERE, "-n", str(count), sys.executable, "-m", "imagenet_fast.netlab.mpi", asked],
        env=os.environ | (_BY_LINK if hosts is not None else {}), preexec_fn=kill_with_parent, process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    )  # fmt: skip
    own, *_ = done.stdout.partition("\n=====")  # of mpiexec's own error report
    lines = [line.strip() for line in own.splitlines() if line.strip() and "MPI_Abort" not in line]
    if done.returncode:
        said = f"with {lines[-1]!r}" if lines else f"without a word in {_START_S} s"
        raise UserError(f"MPI's ranks have ended {said}; install the mpich wheel beside mpi4py, or uninstall mpi4py")
    return [
        {("mpi", size): [Block(*block) for block in blocks] for size, blocks in of_rank}
        for of_rank in json.loads(lines[-1])
    ]


def _mpiexec() -> str | None:
    """Return the path of mpiexec: this Python environment's, else one on PATH, else None."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")


def serve(ranks_each: int, namespaces: Sequence[str], sizes: Sequence[int], rounds: int, block_s: float) -> None:
    """Time all-reduces as one rank of MPI; rank 0 prints the blocks of all ranks as a line of JSON.

    Args:
        ranks_each: Ranks on each node.
        namespaces: Paths of the nodes' network namespaces; empty means this node's own network.
        sizes: Message sizes in bytes.
        rounds: Number of rounds.
        block_s: Seconds for which each all-reduce is repeated in a round, approximately.
    """
    kill_with_parent()
    signal.alarm(_START_S)  # ends ranks that do not come together
    rank = int(os.environ["PMI_RANK"])  # MPI reports the rank too late: it looks for interfaces when it starts
    if namespaces:
        inhabit(Host("", namespaces[rank // ranks_each]))
    import numpy as np
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD

    def block(_: str, size: int, times: int, checked: bool) -> Block:
        message, expected = np.empty((2, -(-size // 4)), np.float32)
        if checked:
            fill_unevenly(message, ranks.rank + 1)
            fill_unevenly(expected, ranks.size * (ranks.size + 1) / 2)
            ranks.Allreduce(MPI.IN_PLACE, message)
            assert (message == expected).all(), "MPI's sum is not that of the ranks"
        message.fill(0)  # repeated sums of zeros stay finite
        once = lambda: ranks.Allreduce(MPI.IN_PLACE, message)  # noqa: E731
        return time_repetitions(once, times, ranks.Barrier)

    slowest = lambda seconds: float(ranks.allreduce(seconds, MPI.MAX))  # noqa: E731
    sent = ranks.allreduce(block("mpi", 4 * _TRIED_ELEMENTS, 1, True).kernel_bytes, MPI.MIN)
    signal.alarm(0)
    if len(namespaces) > 1 and sent < 4 * _TRIED_ELEMENTS:  # all ranks end, so that mpiexec shows what they say
        raise SystemExit(f"links carry {sent:.0f} of the {4 * _TRIED_ELEMENTS} bytes that a rank has to send")
    try:
        blocks = time_in_turns([("mpi", size) for size in sizes], rounds, block_s, block, slowest)
    except BaseException as error:
        print(error or type(error).__name__, flush=True)
        ranks.Abort(1)  # else the other ranks would wait for this one
    own = [(size, [(b.latency_s, b.kernel_bytes, b.times) for b in turns]) for (_, size), turns in blocks.items()]
    if (every := ranks.gather(own)) is not None:
        print(json.dumps(every), flush=True)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
