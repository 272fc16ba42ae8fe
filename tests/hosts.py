"""Nodes of one's own: each in a network namespace, with a host name and an /etc/hosts as Debian writes it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from imagenet_fast.netlab.namespaces import Host, enter, parse_rate, shaped_network
from tests.e2e.command import become_command

_CLONE_NEWNS, _CLONE_NEWUTS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000000, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)

Ended = tuple[int, str, str]
"""A command's exit code, stdout and stderr."""


class Hosts:
    """Nodes named node0, node1, ... Each finds its own name at 127.0.1.1 and the others' at their addresses."""

    def __init__(self, network: list[Host], folder: Path) -> None:
        self._network = network
        self._folder = folder
        self.addresses = [host.address for host in network]
        for number in range(len(network)):
            own = {f"node{n}": "127.0.1.1" if n == number else a for n, a in enumerate(self.addresses)}
            lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **own}.items()]
            (folder / f"hosts{number}").write_text("".join(lines))

    def run(self, commands: Sequence[Sequence[str]], timeout_s: float = 120.0) -> list[Ended]:
        """Run ``imagenet-fast`` with these arguments, one on each node, to the end. Torch is there already."""
        said = [[self._folder / f"{stream}{n}" for stream in ("stdout", "stderr")] for n in range(len(commands))]
        calls = [(n, become_command, (said[n], arguments, {})) for n, arguments in enumerate(commands)]
        codes = self.call(calls, timeout_s)
        return [(code, *(file.read_text() for file in files)) for code, files in zip(codes, said, strict=True)]

    def call(
        self, calls: Sequence[tuple[int, Callable[..., Any], tuple[Any, ...]]], timeout_s: float = 60.0
    ) -> list[Any]:
        """Call each function with its arguments on its node, all at once; what they returned, or the exceptions, or the
        exit codes of those that ended their process."""
        context = multiprocessing.get_context("forkserver")
        under_way = []
        for node, function, arguments in calls:
            ours, theirs = context.Pipe()
            process = context.Process(target=_answer, args=(self, node, function, arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            under_way.append((process, ours))
        answers = []
        for process, end in under_way:
            assert end.poll(timeout_s), "a call hangs"
            try:
                answers.append(end.recv())
            except EOFError:
                process.join(timeout_s)
                answers.append(process.exitcode)
        return answers

    def move(self, number: int) -> None:
        """Make the calling process one of node ``number``."""
        enter(self._network[number])
        _must(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
        _must(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        _must(_libc.mount(bytes(self._folder / f"hosts{number}"), b"/etc/hosts", None, _MS_BIND, None))
        socket.sethostname(f"node{number}")


def _answer(hosts: Hosts, node: int, function: Callable[..., Any], arguments: tuple[Any, ...], end: Connection) -> None:
    hosts.move(node)
    try:
        end.send(function(*arguments))
    except Exception as error:
        end.send(error)


@contextmanager
def hosts(count: int, rate: str = "1gbit") -> Iterator[Hosts]:
    """``count`` nodes on a network of their own. Needs root."""
    with shaped_network(count, parse_rate(rate)) as network, tempfile.TemporaryDirectory() as folder:
        yield Hosts(network, Path(folder))


def _must(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
