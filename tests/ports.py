"""A port for one test alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody is given while the block runs, and that a server of the test may listen on.

    It is kept by a socket that is bound but does not listen. Linux lets a second one be bound beside it, and listen,
    if both say SO_REUSEADDR, as torch's stores do; the kernel gives it to nobody who asks for any port.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
