"""From one command to all local ranks: torchrun, inside this process, with its ends made readable."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from imagenet_fast.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun tells a process of its place, in its environment."""

GRACE_S = 3.0
"""How long a rank may take to end after a signal before it is made to."""

LAUNCHED = "IMAGENET_FAST_RUN"
"""The run directory, in the environment of ranks that our launcher started. It reads there how they ended, so
they need no exit codes, which torchrun would flatten."""


def under_torchrun() -> bool:
    """Whether torchrun, ours or somebody else's, started this process."""
    return all(key in os.environ for key in TORCHRUN)


def local_ranks(asked: int | None) -> int:
    """As many as asked; else one a GPU, and two on a machine without. Raises UserError beyond one a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise UserError(f"--nproc {asked} is more than this machine's {gpus} GPU(s); use at most {gpus}")
    return asked or gpus or 2


def launch(arguments: Sequence[str], ranks: int, nodes: int, endpoint: str | None) -> tuple[int, str]:
    """Run ``imagenet-fast ARGUMENTS`` on ``ranks`` local ranks until all have ended.

    With several ``nodes`` the same command runs on each of them, and ``endpoint`` (HOST:PORT) is where they
    meet. Returns the exit code of the rank that failed first and what became of it, or 0 and nothing. Raises
    UserError where the nodes cannot meet, and KeyboardInterrupt when told to stop.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # torchrun's own account of an end, which we give instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if endpoint:
        _check_endpoint(endpoint)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    where = (
        ["--rdzv-endpoint", endpoint] if endpoint else ["--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"]
    )
    torchrun = get_args_parser().parse_args(
        [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--max-restarts=0"]
        + ["--rdzv-backend=c10d", "--rdzv-id=imagenet-fast", *where, "--module", "imagenet_fast"]
    )
    torchrun.training_script_args = list(arguments)  # not parsed by torchrun, which would match our options' prefixes
    try:
        run(torchrun)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        fate = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return code, f"rank {rank} {fate}"
    except SignalException:
        raise KeyboardInterrupt from None
    except (RendezvousError, DistNetworkError) as error:
        raise UserError(
            f"no rendezvous at {endpoint} ({_first_line(error)}); is the port in use by another program, or the host "
            "unreachable? give every node the same free --rdzv-endpoint HOST:PORT"
        ) from None
    return 0, ""


def _check_endpoint(endpoint: str) -> None:
    """Refuse a port on this machine that something other than a rendezvous listens on; torchrun would hang."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--rdzv-endpoint {endpoint} is not HOST:PORT; write for example node0:29400")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not _is_rendezvous(host, int(port)):
            raise UserError(
                f"port {port} on {host} is in use by another program; give every node another --rdzv-endpoint HOST:PORT"
            ) from None
        # Otherwise another launcher on this machine was first, or the address is another machine's.


def _is_rendezvous(host: str, port: int, patience_s: float = 5.0) -> bool:
    """Whether a TCPStore answers there. A thread asks, since its client waits for ever on a silent listener."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    answered = threading.Event()

    def ask() -> None:
        with suppress(DistError):
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience_s))
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(patience_s)


def end_on_signals() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt in this rank, and end it within ``GRACE_S`` seconds at most.

    A rank that waits inside a collective runs no Python, hence no Python signal handler; a thread that reads
    the interpreter's wake-up pipe sees the signal all the same.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    threading.Thread(target=_end_after_signal, args=(readable,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: what follows must not be interrupted again
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_after_signal(readable: int) -> None:
    while not set(os.read(readable, 1)) & {signal.SIGINT, signal.SIGTERM}:
        pass
    time.sleep(GRACE_S)
    os._exit(1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
