"""Several nodes that train together: where they meet, and what becomes of one that does not come."""

from __future__ import annotations

import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from imagenet_fast.distributed.network_interfaces import Endpoint, await_listener, is_here, parse_endpoint
from imagenet_fast.errors import UserError
from imagenet_fast.launch.slurm import step_nodes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

_LOOK_S = 0.1  # between two looks who has come
_RESTARTS = 10  # where nodes may leave: each that does costs those that stay one


@dataclass(frozen=True)
class LaunchConfig:
    """How many nodes train, with how many ranks each, and where and how long they wait for one another."""

    ranks_each: int
    count: int = 1
    """The most, where there may be fewer."""
    endpoint: Endpoint | None = None
    patience_s: float = 300.0
    restarts: int = 0
    """So often ranks are started again where one was lost."""
    least: int | None = None
    """Of nodes that may leave and join; None where there are always ``count``."""

    @property
    def ranks(self) -> int:
        return self.count * self.ranks_each

    @property
    def counts(self) -> range | None:
        """Of nodes that there may be; None where it does not change."""
        return None if self.least is None else range(self.least, self.count + 1)


def resolve_nodes(
    nproc: int | None, asked: str | int | None, endpoint: str | None, patience_s: float, restarts: int | None = None
) -> LaunchConfig:
    """What the command line asks for; None for the usual number of ranks, for the nodes that srun has started, and for
    as many restarts as these nodes need.

    Raises UserError.
    """
    least, count = parse_nodes("1" if asked is None else str(asked))
    if asked is None and endpoint is None:
        count, endpoint = step_nodes() or (1, None)
    if (count > 1 or least is not None) and endpoint is None:
        raise UserError(f"--nodes {asked} needs --rdzv-endpoint HOST:PORT, the same on every node")
    meeting_place = parse_endpoint(endpoint) if endpoint is not None else None
    if restarts is None:
        restarts = 0 if least is None else _RESTARTS
    return LaunchConfig(local_ranks(nproc), count, meeting_place, patience_s, restarts, least)


def parse_nodes(asked: str) -> tuple[int | None, int]:
    """The least and the most of ``2:4``; None and 4 of ``4``. Raises UserError."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", asked)
    least, most = found.groups() if found else (None, "0")
    if int(most) < 1 or (least is not None and not 1 <= int(least) <= int(most)):
        raise UserError(f"--nodes {asked} is no number of nodes, and no range of them; write for example 4 or 2:4")
    return None if least is None else int(least), int(most)


def parse_fixed_nodes(asked: str) -> int:
    """The number of nodes where it cannot be a range. Raises UserError."""
    least, count = parse_nodes(asked)
    if least is not None:
        raise UserError(f"--nodes {asked} is for `train` alone, on nodes that you start yourself; give one number here")
    return count


def local_ranks(asked: int | None) -> int:
    """As many as asked; else one a GPU, and two on a machine without. Raises UserError beyond one a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise UserError(f"--nproc {asked} is more than this machine's {gpus} GPU(s); use at most {gpus}")
    return asked or gpus or 2


@dataclass(frozen=True)
class RendezvousInfo:
    """All nodes have come, or enough; this one has ``number``, and number 0 holds the store at the ``endpoint``."""

    number: int
    name: str
    """Of this meeting and no other."""
    store: TCPStore
    """To be kept as long as ranks train: they use it too."""


def meet(endpoint: Endpoint, count: int, patience_s: float, least: int | None = None) -> RendezvousInfo:
    """Meet ``count`` nodes at ``endpoint``, which is an address of one of them; that one becomes number 0. Where
    ``least`` are enough, whoever comes after them has met them at once.

    torchrun's own rendezvous finds out who holds the store by comparing host names, numbers nodes as it likes, and
    says of a missing one only that time is up. Raises UserError where a node is missing or too many, or the endpoint
    cannot be had; the others are told.
    """
    from torch.distributed import DistError

    deadline = time.monotonic() + patience_s
    here = is_here(endpoint.host)
    if not here:
        # The name of a pod that has just been made leads nowhere for a while, or to the pod before it.
        await_listener(endpoint, deadline, needless=lambda: is_here(endpoint.host))
        here = is_here(endpoint.host)
    held = _hold(endpoint) if here else None
    try:
        store = held or _visit(endpoint, deadline)
        number, name = _arrive(store, held is not None, endpoint, count, least, deadline, patience_s)
    except DistError:
        raise UserError(
            f"the node at {endpoint} has ended before {f'all {count}' if least is None else f'at least {least}'} nodes "
            "had come; its own output says why"
        ) from None
    return RendezvousInfo(number, name, store)


def _arrive(
    store: TCPStore, holds: bool, endpoint: Endpoint, count: int, least: int | None, deadline: float, patience_s: float
) -> tuple[int, str]:
    """Take a number, and wait until all have come, or enough."""
    from torch._C._distributed_c10d import PrefixStore

    told = str(count) if least is None else f"{least}:{count}"
    needed, enough = (count, f"{count}") if least is None else (least, f"at least {least}")
    books = PrefixStore("imagenet-fast", store)
    if holds:
        books.set("name", uuid.uuid4().hex)
        books.set("count", told)
    while not holds and not books.check(["open"]):
        if time.monotonic() > deadline:
            raise UserError(f"nodes of another program meet at {endpoint}; give every node another --rdzv-endpoint")
        time.sleep(_LOOK_S)
    with _telling_others(books):
        if (theirs := books.get("count").decode()) != told:
            raise UserError(f"one node was told --nodes {told}, the one at {endpoint} --nodes {theirs}; correct one")
    number = books.add("arrived", 1) - 1
    if holds:
        books.set("open", "")  # and not before: the first number is the holder's
    if least is None and number >= count:
        raise UserError(
            f"{count} nodes have already met at {endpoint}: this one is too many, or belongs to another run, which "
            "needs another --rdzv-endpoint"
        )
    with _telling_others(books):
        books.set(f"host/{number}", socket.gethostname())
        while (come := books.add("arrived", 0)) < needed:
            if books.check(["end"]):
                raise UserError(books.get("end").decode())
            if time.monotonic() > deadline:
                names = ", ".join(books.get(f"host/{other}").decode() for other in range(come))
                raise UserError(
                    f"{come} of {enough} nodes came to {endpoint} within {patience_s:g} s ({names}); start the same "
                    "command on the others, or wait longer with --join-timeout"
                )
            time.sleep(_LOOK_S)
    return number, books.get("name").decode()


@contextmanager
def _telling_others(books: PrefixStore) -> Iterator[None]:
    """Where the meeting ends for this node before all have come, it ends for all."""
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, UserError) else f"{socket.gethostname()} left before all had come"
        with suppress(Exception):
            books.set("end", said)
            time.sleep(5 * _LOOK_S)  # the store may end with this process: the others look first
        raise


def _hold(endpoint: Endpoint) -> TCPStore | None:
    """The store that all nodes meet in; None where the port is taken, by another launcher on this machine it may be."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        # Several tenants: torchrun opens the same one again, for which then no second port is needed.
        return TCPStore(endpoint.host, endpoint.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError:
        return None


def _visit(endpoint: Endpoint, deadline: float) -> TCPStore:
    """The store that another launcher holds. A thread asks: torch's client waits for ever on a silent listener."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    await_listener(endpoint, deadline)
    patience_s = max(1.0, min(5.0, deadline - time.monotonic()))
    answered: list[TCPStore] = []

    def ask() -> None:
        with suppress(DistError):
            limit = timedelta(seconds=patience_s)
            answered.append(TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=limit))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience_s)
    if not answered:
        where = f"port {endpoint.port} on {endpoint.host} is in use by another program"
        raise UserError(f"{where}; give every node another --rdzv-endpoint HOST:PORT")
    return answered[0]
