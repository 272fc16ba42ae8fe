"""Reach other nodes, and find the interface and address by which they reach this one."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from imagenet_fast.distributed.board import wait_until
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError, warn


@dataclass(frozen=True)
class Endpoint:
    """A port of a node, which is given by host name, IPv4 or IPv6 address."""

    host: str
    port: int

    def __post_init__(self) -> None:
        """Raise UserError for a name that no resolver takes."""
        try:
            self.host.encode("idna")
        except UnicodeError:
            why = "a part of it is empty or has more than 63 characters"
            raise UserError(f"{self.host} cannot be a host's name, since {why}; choose another") from None

    def __str__(self) -> str:
        """Return ``HOST:PORT``, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """Route to another node: this node's address as the other sees it, and the interface with that address."""

    address: str
    interface: str


def parse_endpoint(text: str) -> Endpoint:
    """Parse HOST:PORT, with an IPv6 address in brackets. Raises UserError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    bare = ":" in host and not text.startswith("[")
    if not host or bare or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"--rdzv-endpoint {text} is not HOST:PORT; write for example node0:29400, 10.0.0.1:29400 or [fd00::1]:29400"
        )
    if "%" in host:
        raise UserError(f"--rdzv-endpoint {text} has a zone, which torchrun refuses; give a name, or another address")
    return Endpoint(host, int(port))


def is_here(host: str) -> bool:
    """Return whether any address of ``host`` is this node's; False if ``host`` cannot be resolved."""
    try:
        found = {_plain(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = _own_addresses()
    return any(_is_own(address, own) for address in found)


def route_to(host: str) -> Route | None:
    """Return the route to ``host``, or None if it is this node or cannot be reached."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    own = _own_addresses()
    for family, kind, protocol, _, address in found:
        if _is_own(_plain(address[0]), own):
            continue
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: it only asks the routing table
                source = _plain(probe.getsockname()[0])
        except OSError:
            continue
        if source in own:
            return Route(source, own[source])
    return None


def await_listener(endpoint: Endpoint, deadline: float, needless: Callable[[], bool] = lambda: False) -> None:
    """Wait until ``endpoint`` accepts connections, or ``needless`` returns True.

    Args:
        endpoint: Where to connect.
        deadline: When to give up, by ``time.monotonic``.
        needless: Called after each failed attempt; True ends the wait.

    Raises:
        UserError: If the deadline has passed, with the reason why no connection was made.
    """
    begun, reason = time.monotonic(), ""

    def answers() -> bool:
        nonlocal reason
        try:
            left = max(0.1, min(5.0, deadline - time.monotonic()))
            socket.create_connection((endpoint.host, endpoint.port), timeout=left).close()
            return True
        except socket.gaierror:
            unheard = not reason and os.environ.get("LOCAL_RANK", "0") == "0"
            reason = f"the name {endpoint.host} cannot be resolved here; give an address, or add it to /etc/hosts"
            if unheard:
                warn(f"{reason}; it is tried for {deadline - time.monotonic():.0f} s")
        except OSError as error:
            reason = (
                f"{cause(error)}; start the same command on that host, whose `ip addr` must list it, or check firewalls"
            )
        return needless()

    if not wait_until(answers, deadline):
        waited = time.monotonic() - begun
        raise UserError(f"no node could be reached at {endpoint} within {waited:.0f} s: {reason}")


def cause(error: OSError) -> str:
    """Return why a connection could not be made, in lower case."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (error.strerror or str(error)).lower()


def _own_addresses() -> dict[str, str]:
    """Return this node's addresses, with the interface of each."""
    return {
        _plain(entry.address): interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _is_own(address: str, own: dict[str, str]) -> bool:
    """Return whether ``address`` is this node's; Debian maps its host name to 127.0.1.1, which no interface has."""
    return address in own or ipaddress.ip_address(address).is_loopback


def _plain(address: object) -> str:
    """Return an address without its scope, and an IPv4-mapped IPv6 address as IPv4."""
    found = ipaddress.ip_address(str(address).partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def sent_bytes(interface: str) -> int | None:
    """Return the bytes sent through ``interface`` so far, headers included; None if there is none, or nobody counts."""
    with suppress(OSError):
        if counters := psutil.net_io_counters(pernic=True, nowrap=False).get(interface):
            return int(counters.bytes_sent)
    return None


def link_bytes(place: RankInfo) -> float:
    """Return this rank's share of the bytes that its node has sent through gloo's interface so far; NaN if unknown."""
    sent = sent_bytes(os.environ.get("GLOO_SOCKET_IFNAME", "")) if place.is_multi_node else None
    return math.nan if sent is None else sent / place.local_size
