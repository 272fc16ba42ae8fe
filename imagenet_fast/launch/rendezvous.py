"""Rendezvous of several nodes that train together, and errors about nodes that do not arrive."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from imagenet_fast.distributed.cgroup_limits import usable_memory
from imagenet_fast.distributed.network_interfaces import Endpoint, await_listener, is_here, parse_endpoint
from imagenet_fast.distributed.rank_info import refuse_mpirun
from imagenet_fast.distributed.slurm import step_nodes
from imagenet_fast.distributed.store import wait_until
from imagenet_fast.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

_LOOK_S = 0.1  # between two looks for nodes that have arrived
_RANK_BYTES = 150 * 2**20  # memory that a rank takes at least, with torch loaded
_RESTARTS = 10  # if nodes may leave: each one that does uses up a restart


@dataclass(frozen=True)
class LaunchConfig:
    """Number of nodes and of ranks per node, and where and how long the nodes wait for one another."""

    ranks_each: int
    count: int = 1
    """Number of nodes; the maximum if it may vary."""
    endpoint: Endpoint | None = None
    join_timeout_s: float = 300.0
    restarts: int = 0
    """The number of times that torchrun restarts the ranks after one was lost."""
    least: int | None = None
    """Minimum number of nodes if they may leave and join; None if there are always ``count``."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes; the maximum if it may vary."""
        return self.count * self.ranks_each

    @property
    def counts(self) -> range | None:
        """Possible numbers of nodes; None if the number is fixed."""
        return None if self.least is None else range(self.least, self.count + 1)


def resolve_nodes(
    nproc: int | None, asked: str | int | None, endpoint: str | None, join_timeout_s: float, restarts: int | None = None
) -> LaunchConfig:
    """Build the launch configuration that the command line asks for.

    Args:
        nproc: Ranks per node; None for the usual number.
        asked: Number of nodes, or a range like ``2:4``; None for the nodes that srun has started, or one.
        endpoint: HOST:PORT where the nodes meet; None for the first node that srun has started, or a single node.
        join_timeout_s: Seconds to wait for the other nodes.
        restarts: How often to restart ranks; None for as often as these nodes need.

    Raises:
        UserError: If an option is invalid, or an endpoint is missing.
    """
    least, count = parse_nodes("1" if asked is None else str(asked))
    if asked is None and (step := step_nodes()) is not None:
        count, endpoint = step[0], endpoint or step[1]
    elif asked is None:
        refuse_mpirun()
    if (count > 1 or least is not None) and endpoint is None:
        raise UserError(f"--nodes {asked} needs --rdzv-endpoint HOST:PORT, the same on every node")
    meeting_place = parse_endpoint(endpoint) if endpoint is not None else None
    if restarts is None:
        restarts = 0 if least is None else _RESTARTS
    return LaunchConfig(local_ranks(nproc), count, meeting_place, join_timeout_s, restarts, least)


def parse_nodes(asked: str) -> tuple[int | None, int]:
    """Return minimum and maximum of ``2:4``, or None and 4 for ``4``. Raises UserError."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", asked)
    least, most = found.groups() if found else (None, "0")
    if int(most) < 1 or (least is not None and not 1 <= int(least) <= int(most)):
        raise UserError(f"--nodes {asked} is no number of nodes, and no range of them; write for example 4 or 2:4")
    return None if least is None else int(least), int(most)


def parse_fixed_nodes(asked: str) -> int:
    """Return the number of nodes if it must not be a range. Raises UserError."""
    least, count = parse_nodes(asked)
    if least is not None:
        raise UserError(f"--nodes {asked} is for `train` alone, on nodes that you start yourself; give one number here")
    return count


def local_ranks(asked: int | None) -> int:
    """Return ``asked`` ranks; if None, one per GPU, or two without GPUs.

    Raises:
        UserError: There are more ranks than GPUs, or than fit into memory.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise UserError(f"--nproc {asked} is more than this node's {gpus} GPU(s); use at most {gpus}")
    if asked is not None and asked * _RANK_BYTES > (free := usable_memory()):
        raise UserError(
            f"--nproc {asked} takes more than {asked * _RANK_BYTES / 2**30:.0f} GiB of memory, and "
            f"{free / 2**30:.0f} GiB are free; give at most {max(1, free // _RANK_BYTES)}"
        )
    return asked or gpus or 2


@dataclass(frozen=True)
class RendezvousInfo:
    """Result of a meeting of all nodes, or enough of them.

    This node has ``number``. Number 0 holds the store at the endpoint.
    """

    number: int
    name: str
    """Name that is unique to this meeting."""
    store: TCPStore
    """Store of the nodes. Keep it as long as ranks train: they use it too."""


def meet(endpoint: Endpoint, count: int, join_timeout_s: float, least: int | None = None) -> RendezvousInfo:
    """Meet ``count`` nodes at ``endpoint``, which is an address of one of them; that node gets number 0.

    torchrun's own rendezvous compares host names to find out which node holds the store, numbers nodes arbitrarily, and
    reports a missing node only as a timeout.

    Args:
        endpoint: Where the nodes meet.
        count: Number of nodes; the maximum if ``least`` is given.
        join_timeout_s: Seconds to wait for the other nodes.
        least: Number of nodes that is enough; a later node joins at once. None if all ``count`` are needed.

    Raises:
        UserError: If a node is missing or too many, or the endpoint cannot be used. Nodes that still wait raise it too.
    """
    from torch.distributed import DistError

    deadline = time.monotonic() + join_timeout_s
    here = is_here(endpoint.host)
    if not here:
        # The name of a new pod does not resolve for a while, or resolves to the pod before it.
        await_listener(endpoint, deadline, needless=lambda: is_here(endpoint.host))
        here = is_here(endpoint.host)
    held = _hold(endpoint) if here else None
    try:
        store = held or _visit(endpoint, deadline)
        number, name = _arrive(store, held is not None, endpoint, count, least, deadline, join_timeout_s)
    except DistError:
        raise UserError(
            f"the node at {endpoint} has ended before {f'all {count}' if least is None else f'at least {least}'} nodes "
            "had come; its own output says why"
        ) from None
    return RendezvousInfo(number, name, store)


def _arrive(
    store: TCPStore,
    holds: bool,
    endpoint: Endpoint,
    count: int,
    least: int | None,
    deadline: float,
    join_timeout_s: float,
) -> tuple[int, str]:
    """Take a number, and wait until all nodes have arrived, or enough."""
    from torch._C._distributed_c10d import PrefixStore

    told = str(count) if least is None else f"{least}:{count}"
    needed, enough = (count, f"{count}") if least is None else (least, f"at least {least}")
    records = PrefixStore("imagenet-fast", store)
    if holds:
        records.set("name", uuid.uuid4().hex)
        records.set("count", told)
    if not holds and not wait_until(partial(records.check, ["open"]), deadline, _LOOK_S):
        raise UserError(f"nodes of another program meet at {endpoint}; give every node another --rdzv-endpoint")
    with _telling_others(records):
        if (theirs := records.get("count").decode()) != told:
            raise UserError(f"one node was told --nodes {told}, the one at {endpoint} --nodes {theirs}; correct one")
    number = records.add("arrived", 1) - 1
    if holds:
        records.set("open", "")  # not earlier: the first number is the holder's
    if least is None and number >= count:
        raise UserError(
            f"{count} nodes have already met at {endpoint}: this one is too many, or belongs to another run, which "
            "needs another --rdzv-endpoint"
        )
    with _telling_others(records):
        records.set(f"host/{number}", socket.gethostname())
        records.set(f"place/{number}", _place_in_job())
        if not wait_until(partial(_have_come, records, needed), deadline, _LOOK_S):
            come = records.add("arrived", 0)
            names = ", ".join(records.get(f"host/{other}").decode() for other in range(come))
            raise UserError(
                f"{come} of {enough} nodes came to {endpoint} within {join_timeout_s:g} s ({names}); start the same "
                "command on the others, or wait longer with --join-timeout"
            )
        if least is None:
            number = _number_by_place(records, number, count)
    return number, records.get("name").decode()


def _place_in_job(environment: Mapping[str, str] = os.environ) -> str:
    """Return this node's place among those of the job, as Slurm or Kubernetes counts them; 0 where nobody does."""
    place = environment.get("SLURM_NODEID") or environment.get("JOB_COMPLETION_INDEX") or ""
    return place if place.isascii() and place.isdecimal() else "0"


def _number_by_place(records: PrefixStore, arrival: int, count: int) -> int:
    """Return the number of the node that came as the ``arrival``-th: behind the holder, nodes are in the job's order.

    Rings go from node to node in this order, and a scheduler counts neighbours on one switch one after the other.
    """
    if arrival == 0:
        places = [int(records.get(f"place/{other}").decode()) for other in range(count)]
        records.set("numbers", json.dumps([0, *sorted(range(1, count), key=lambda other: (places[other], other))]))
    return int(json.loads(records.get("numbers").decode()).index(arrival))


def _have_come(records: PrefixStore, needed: int) -> bool:
    """Return whether ``needed`` nodes have arrived; raise UserError if one has ended the meeting."""
    if records.add("arrived", 0) >= needed:
        return True
    if records.check(["end"]):
        raise UserError(records.get("end").decode())
    return False


@contextmanager
def _telling_others(records: PrefixStore) -> Iterator[None]:
    """Publish an error in the block, which ends the meeting for all nodes."""
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, UserError) else f"{socket.gethostname()} left before all had come"
        with suppress(Exception):
            records.set("end", said)
            time.sleep(5 * _LOOK_S)  # the store may end with this process: the others look first
        raise


def _hold(endpoint: Endpoint) -> TCPStore | None:
    """Open the store in which all nodes meet; None if the port is taken, perhaps by a launcher on this node."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        # Multi-tenant: torchrun opens the same store again, and so needs no second port.
        return TCPStore(endpoint.host, endpoint.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError:
        return None


def _visit(endpoint: Endpoint, deadline: float) -> TCPStore:
    """Connect to the store of another launcher, in a thread: torch's client waits for ever on a silent listener."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    await_listener(endpoint, deadline)
    wait_s = max(1.0, min(5.0, deadline - time.monotonic()))
    answered: list[TCPStore] = []

    def ask() -> None:
        with suppress(DistError):
            limit = timedelta(seconds=wait_s)
            answered.append(TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=limit))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s)
    if not answered:
        where = f"port {endpoint.port} on {endpoint.host} is in use by another program"
        raise UserError(f"{where}; give every node another --rdzv-endpoint HOST:PORT")
    return answered[0]
