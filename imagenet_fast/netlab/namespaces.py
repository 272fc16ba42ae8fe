"""Simulate a network: nodes in Linux network namespaces, joined by links of a given rate.

Each node has one interface, ``eth0``, whose egress is shaped by a token bucket; all are connected to one bridge. The
namespaces have no names: each exists only while a descriptor of this process, or a process inside, keeps it. So two
networks cannot clash, and nothing is left behind however this process ends.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imagenet_fast.errors import UserError

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

INTERFACE = "eth0"
"""Name of the network interface of every node."""


@dataclass(frozen=True)
class Host:
    """One simulated node: its IP address, and the path of its network namespace.

    The path works in every process of this real node.
    """

    address: str
    namespace: str


@contextmanager
def shaped_network(hosts: int, bits_per_s: int) -> Iterator[list[Host]]:
    """Create a network of ``hosts`` nodes, each sending at ``bits_per_s`` at most; remove it at exit.

    Raises:
        UserError: Such a network cannot be made here.
    """
    _check()
    with ExitStack() as kept:
        hub, *ends = (_keep(kept, _new_namespace()) for _ in range(hosts + 1))
        _inside(hub, partial(_ip, "link add bridge type bridge", "link set bridge up"))
        made = []
        for number, end in enumerate(ends):
            address = f"10.77.{number // 250}.{number % 250 + 1}"
            _inside(hub, partial(_plug, end, f"port{number}"))
            _inside(end, partial(_configure, address, bits_per_s))
            made.append(Host(address, f"/proc/{os.getpid()}/fd/{end}"))
        yield made


def enter(host: Host) -> None:
    """Move the calling thread, and all that it starts from now on, to the network of ``host``."""
    descriptor = os.open(host.namespace, os.O_RDONLY)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def parse_rate(text: str) -> int:
    """Parse a rate in tc's notation, such as ``250mbit`` or ``1.5gbit``, into bits per second.

    Raises:
        UserError: ``text`` is no such rate, or is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"rate {text!r} is not a number with kbit, mbit or gbit, such as 250mbit")
    return round(float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]])


def _check() -> None:
    """Raise UserError unless this is Linux, the user is root, and iproute2 is installed."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not hasattr(_libc, "setns"):
        reason = "this is not Linux; run it there"
    elif os.geteuid() != 0:
        reason = "you are not root; run it as root"
    elif missing:
        reason = f"{' and '.join(missing)} not found; install iproute2"
    else:
        return
    raise UserError(f"a shaped network cannot be made here: {reason}")


def _new_namespace() -> int:
    """Return a descriptor of a new network namespace.

    A separate thread makes it, because unsharing moves the calling thread.
    """

    def make() -> int:
        if _libc.unshare(_CLONE_NEWNET):
            raise UserError(
                f"a network namespace cannot be made here ({os.strerror(ctypes.get_errno())}); a container needs "
                "CAP_SYS_ADMIN for it"
            )
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _keep(stack: ExitStack, descriptor: int) -> int:
    """Close ``descriptor`` when ``stack`` exits, and return it."""
    stack.callback(os.close, descriptor)
    return descriptor


def _inside(namespace: int, act: Callable[[], None]) -> None:
    """Call ``act`` inside ``namespace``, in a separate thread."""

    def moved() -> None:
        _set_namespace(namespace)
        act()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(moved).result()


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


def _plug(end: int, port: str) -> None:
    """Connect this bridge to the namespace ``end`` by a veth pair."""
    _ip(f"link add {port} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{end}")
    _ip(f"link set {port} master bridge up")


def _configure(address: str, bits_per_s: int) -> None:
    """Set the address and rate of this namespace's interface, and bring it up."""
    try:
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_bytes(b"1")  # IPv6's own packets would be counted
    except OSError as error:
        raise UserError(f"a shaped network cannot be made here: {error}; a container needs to be privileged") from None
    _ip("link set lo up", f"addr add {address}/16 dev {INTERFACE}", f"link set {INTERFACE} up")
    _run(f"tc qdisc add dev {INTERFACE} root tbf rate {bits_per_s}bit burst 256kb latency 50ms")


def _ip(*commands: str) -> None:
    for command in commands:
        _run(f"ip {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(f"a shaped network cannot be made here: `{command}` says {done.stderr.strip()!r}")
