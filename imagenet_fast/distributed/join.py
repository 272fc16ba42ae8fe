"""How nodes, and then their ranks, come together: by one protocol, on a board in a store that the first of them holds.

Whoever arrives compares itself with number 0 and leaves a record. Number 0 waits for all records and tells all what
follows from them. What one refuses ends the meeting for all, in the same words.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError

from imagenet_fast.distributed.board import Board, call_within
from imagenet_fast.distributed.cores import exceeded_limit, raise_open_files
from imagenet_fast.distributed.network import Endpoint, await_listener, cause, is_here, route_to
from imagenet_fast.distributed.ranks import RankInfo, ranges
from imagenet_fast.distributed.versions import software
from imagenet_fast.errors import UserError, exit_with_error, first_line, warn
from imagenet_fast.recipe.job import flat_tables

_LINGER_S = 1.0  # that a store lasts after a refusal: others look for it every quarter of a second
_LATE_S = 5.0  # that others wait for number 0 after it has waited for them
_ANSWER_S = 5.0  # in which a store answers whoever has connected to it
_DRIFT_S = 5.0  # of a clock; others hear what number 0 has concluded a quarter of a second later, or more under load
_LISTED = 5  # at most, of the keys in which jobs differ
_INTERFACES = (
    "let the nodes' firewalls pass it, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to "
    "the others"
)
_Record = Mapping[str, Any]


@dataclass(frozen=True)
class Meeting:
    """Result of a meeting of all nodes, or enough of them.

    This node has ``number``. Number 0 holds the store at ``endpoint``.
    """

    number: int
    name: str
    """Name that is unique to this meeting."""
    endpoint: Endpoint
    store: TCPStore
    """Store of the nodes. Keep it as long as ranks train: they use it too."""


def meet(endpoint: Endpoint | None, count: int, join_timeout_s: float, least: int | None = None) -> Meeting:
    """Meet ``count`` nodes at ``endpoint``, which is an address of one of them; that node gets number 0.

    torchrun's own rendezvous compares host names to find out which node holds the store, numbers nodes arbitrarily, and
    reports a missing node only as a timeout.

    Args:
        endpoint: Where the nodes meet; None: this node meets nobody, and holds the store at its loopback interface.
        count: Number of nodes; the maximum if ``least`` is given.
        join_timeout_s: Seconds to wait for the other nodes.
        least: Number of nodes that is enough; a later node joins at once. None if all ``count`` are needed.

    Raises:
        UserError: If a node is missing or too many, or the endpoint cannot be used. Nodes that still wait raise it too.
    """
    deadline = time.monotonic() + join_timeout_s
    Endpoint(socket.gethostname(), 0)  # torchrun looks for it
    endpoint = endpoint or _own_endpoint()
    host = endpoint.host
    if not is_here(host):
        # The name of a new pod does not resolve for a while, or resolves to the pod before it.
        await_listener(endpoint, deadline, needless=lambda: is_here(host))
    held = _serve(endpoint) if is_here(host) else None
    store = held or _connect(endpoint, deadline, _ANSWER_S, "give every node another --rdzv-endpoint HOST:PORT")
    endpoint = Endpoint(host, store.port)
    needed, told = (count, f"{count}") if least is None else (least, f"{least}:{count}")
    all_, enough = ("all ", f"{needed}") if least is None else ("", f"at least {needed}")
    gone = f"the node at {endpoint} has ended before {all_}{enough} nodes had come; its own output says why"
    too_many = (
        f"{count} nodes have already met at {endpoint}: this one is too many, or belongs to another run, which needs "
        "another --rdzv-endpoint"
    )

    def differs(first: _Record) -> str:
        if first["nodes"] == told:
            return ""
        return f"one node was told --nodes {told}, the one at {endpoint} --nodes {first['nodes']}; correct one"

    def conclude(came: Mapping[int, _Record]) -> _Record:
        if len(came) < needed:
            names = ", ".join(record["host"] for record in came.values())
            raise UserError(
                f"{len(came)} of {enough} nodes came to {endpoint} within {join_timeout_s:g} s "
                f"({names}); start the same command on the others, or wait longer with --join-timeout"
            )
        # Rings go from node to node, and a scheduler counts neighbours on one switch one after the other.
        behind = sorted(range(1, needed), key=lambda other: (came[other]["place"], other))
        order = [0, *behind] if least is None else []
        return {"name": uuid.uuid4().hex, "order": order, "time": time.time()}

    board = _board(store, "nodes")
    try:
        if held is None and board.read("arrived/0", deadline) is None:
            raise UserError(f"nodes of another program meet at {endpoint}; give every node another --rdzv-endpoint")
        with socket.socket(socket.AF_UNIX) as seat:
            number = _number(board, endpoint, count, seat) if held is None else 0
            if least is None and number >= count:
                raise UserError(too_many)
            place = os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX") or ""  # among the job's
            own = {"host": socket.gethostname(), "nodes": told, "place": int(place) if place.isdecimal() else 0}
            late = board.read("answer") is not None
            answer = _arrive(board, number, own, needed, deadline, differs, conclude, gone)
            if least is None and board.count(f"joined/{number}") > 1:  # one of its name has not died while it waited
                raise UserError(too_many)
    except DistError:
        raise UserError(gone) from None
    except KeyboardInterrupt:
        with suppress(DistError):
            _refuse(board, f"{socket.gethostname()} left before all had come", held is not None)
        raise
    if not late and abs(apart := time.time() - answer["time"]) > _DRIFT_S:
        clocks = f"the clocks of {own['host']} and of the node at {endpoint} are {abs(apart):.0f} s apart"
        warn(f"{clocks}; start chrony or ntpd on every node")
    number = answer["order"].index(number) if answer["order"] else number
    return Meeting(number, answer["name"], endpoint, store)


def introduce(place: RankInfo, agreed: Mapping[str, Any], join_timeout_s: float, device: str = "cpu") -> Store:
    """Return the store at ``MASTER_ADDR:MASTER_PORT``, once every rank has arrived and all agree.

    Across nodes this also sets the interface for gloo and NCCL to the one that leads to the other nodes, unless the
    user has set it. By default gloo takes the address of the host name, which Debian maps to the loopback interface,
    and NCCL all interfaces, also those that lead nowhere.

    Args:
        place: This process's rank.
        agreed: Settings that must be equal on all ranks.
        join_timeout_s: Seconds to wait for all ranks.
        device: Type of the device that this rank computes on, which must be the same on all ranks.

    Raises:
        UserError: On every rank that has arrived, if a rank is missing or the ranks disagree.
    """
    deadline = time.monotonic() + join_timeout_s
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UserError(
            "the environment has RANK but no MASTER_ADDR with a number as MASTER_PORT; start the ranks with torchrun"
        )
    master = Endpoint(address, int(port))
    store = _open_store(place, master, join_timeout_s, deadline)
    route = route_to(master.host) if place.is_multi_node else None
    own: _Record = {"host": socket.gethostname(), "address": route.address if route else "", "device": device}
    full = {**own, "software": software(), "agreed": agreed}

    def conclude(came: Mapping[int, _Record]) -> _Record:
        if missing := [rank for rank in range(place.size) if rank not in came]:
            raise UserError(
                f"rank {ranges(missing)} of {place.size} did not come within {join_timeout_s:g} s; see "
                "what its node says, or wait longer with --join-timeout"
            )
        return {"elsewhere": next((record["address"] for record in came.values() if record["address"]), "")}

    gone = (
        f"rank 0 ended, or never came to {master.host}, before all {place.size} ranks were together; see its own output"
    )
    try:
        answer = _arrive(
            _board(store, "ranks"), place.rank, full if place.is_main else own, place.size, deadline,
            lambda first: _difference(first, full, place.rank), conclude, gone,
        )  # fmt: skip
    except DistError:
        raise UserError(gone) from None
    if place.is_multi_node and route is None and answer["elsewhere"]:  # the master's own node
        route = route_to(answer["elsewhere"])
    if route is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route.interface}")  # without "=", eth1 would match eth10 too
    return store


@contextmanager
def connecting(place: RankInfo, store: Store, join_timeout_s: float) -> Iterator[None]:
    """Watch the block in which ranks connect to one another, and end all ranks if one cannot connect.

    A thread ends the process, with exit code 2, if another rank failed to connect, the store is lost or
    ``join_timeout_s`` is over. It must be a thread, with a store client of its own, since a backend that waits for a
    connection runs no Python.

    Raises:
        UserError: If this rank cannot connect to the others.
    """
    connected = threading.Event()
    deadline = time.monotonic() + join_timeout_s

    def watch() -> None:
        try:
            board = Board(store.clone(), "ranks", connected.wait)
            while not connected.wait(0.2):
                if broken := board.read("broken"):
                    _end(broken)
                if time.monotonic() > deadline:
                    _end(f"rank {place.rank} had no connection to all others after {join_timeout_s:g} s; {_INTERFACES}")
        except DistError:
            if not connected.is_set():
                _end(f"rank {place.rank} lost the store of all ranks while they connected; see the output of rank 0")

    if place.size > 1:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        connected.set()
    except RuntimeError as error:
        connected.set()
        reason = first_line(error)
        limit = exceeded_limit(reason)
        why = f": {limit}" if limit else f" ({reason}); {_INTERFACES}"
        sentence = f"rank {place.rank} could not connect to the others{why}"
        with suppress(DistError):
            Board(store, "ranks").first("broken", sentence)
            time.sleep(_LINGER_S if place.is_main else 0)
        raise UserError(sentence) from None


def _end(sentence: str) -> NoReturn:
    with suppress(SystemExit):
        exit_with_error(sentence)
    os._exit(2)


def _board(store: Store, part: str) -> Board:
    """Return a board on which each wait ends with the first refusal."""

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if (answer := plain.read("answer")) and answer["refusal"]:
            raise UserError(answer["refusal"])

    plain = Board(store, part)
    return Board(store, part, pause)


def _arrive(
    board: Board, number: int, own: _Record, needed: int, deadline: float, differs: Callable[[_Record], str],
    conclude: Callable[[Mapping[int, _Record]], _Record], gone: str,
) -> _Record:  # fmt: skip
    """Leave a record, and return what number 0 concludes when the first ``needed`` have; or refuse, on all alike.

    ``differs`` is given the record of number 0, and returns why this one does not belong with it, if so. Number 0
    waits until ``deadline``, and calls ``conclude`` with the records of those that have come. If it has ended, the
    others say ``gone``.
    """
    try:
        if number:
            if (first := board.read("arrived/0", deadline + _LATE_S)) is None:
                raise UserError(gone)
            if refusal := differs(first):
                raise UserError(refusal)
        board.post(f"arrived/{number}", own)
        if number == 0:
            board.first("answer", {"refusal": "", **conclude(board.gather("arrived", range(needed), deadline))})
        if (answer := board.read("answer", deadline + _LATE_S)) is None:
            raise UserError(gone)
        if answer["refusal"]:
            raise UserError(answer["refusal"])
    except UserError as error:
        _refuse(board, str(error), holds=number == 0)
        raise
    found: _Record = answer
    return found


def _number(board: Board, endpoint: Endpoint, count: int, seat: socket.socket) -> int:
    """Return the number of this node, from 1 on: a new one, or that of a node of its name, which must have died.

    A pod is named after its host and index, since one in its place has another address. Other nodes are named after
    their address. Of several launchers there each has a ``seat`` of its own, which is free again when it has died.
    """
    if index := os.environ.get("JOB_COMPLETION_INDEX"):
        name = f"{socket.gethostname()}/{index}"
    else:
        route = route_to(endpoint.host)
        for sitting in range(count):
            with suppress(OSError):  # taken
                seat.bind(f"\0imagenet-fast-{endpoint.port}-{sitting}")
                break
        name = f"{route.address if route else ''}/{sitting}"
    return board.read(f"number/{name}") or int(board.first(f"number/{name}", board.count("came")))


def _refuse(board: Board, sentence: str, holds: bool) -> None:
    """End the meeting for all; wait until they have read why if the store ends with this process."""
    board.first("answer", {"refusal": sentence})
    time.sleep(_LINGER_S if holds else 0)


def _difference(first: _Record, own: _Record, rank: int) -> str:
    """Return why ``rank`` and rank 0 cannot train together; empty if they can."""
    who = (f"rank 0 ({first['host']})", f"rank {rank} ({own['host']})")
    if first["software"] != own["software"]:
        found = f"{who[0]} runs {first['software']} and {who[1]} runs {own['software']}"
        return f"{found}; install the same on every node"
    if first["device"] != own["device"]:
        found = f"{who[0]} on {first['device']} and {who[1]} on {own['device']}"
        fix = "run `imagenet-fast doctor` on both nodes, or set CUDA_VISIBLE_DEVICES= on every node to train on CPUs"
        return f"ranks compute on devices of one type, but {found}; {fix}"
    theirs, ours = (
        {key: json.dumps(value) for key, value in flat_tables(record["agreed"]).items()} for record in (first, own)
    )
    differing = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    if not differing:
        return ""
    pairs = [f"{key} is {theirs.get(key, 'unset')} and {ours.get(key, 'unset')}" for key in differing[:_LISTED]]
    listed = ", ".join(pairs) + (f" and {len(differing) - _LISTED} more" if len(differing) > _LISTED else "")
    return f"{who[0]} and {who[1]} were told different things: {listed}; give every node the same command"


def _open_store(place: RankInfo, master: Endpoint, join_timeout_s: float, deadline: float) -> Store:
    """Open the store of all ranks at ``master``; rank 0 holds it, unless torchrun does."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # After a restart torchrun's store still has the keys of the previous attempt; a store that rank 0 holds is new. The
    # restart count is the same on all nodes only if nodes never leave or join.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if shared else '0'}"
    limit = timedelta(seconds=join_timeout_s)
    another = "choose another MASTER_ADDR and MASTER_PORT, or --rdzv-endpoint HOST:PORT"
    if shared or not place.is_main:
        store = _connect(master, deadline, join_timeout_s, another)
        store.set_timeout(limit)
        return PrefixStore(attempt, store)
    try:
        store = TCPStore(master.host, master.port, is_master=True, wait_for_workers=False, timeout=limit)
    except DistError as error:
        elsewhere = f"{master.host} is no address of the node that has rank 0"
        reason = first_line(error) if is_here(master.host) else elsewhere
        raise UserError(f"rank 0 cannot use {master} ({reason}); {another}") from None
    return PrefixStore(attempt, store)


def _own_endpoint() -> Endpoint:
    """Return any free port of the loopback interface, over which a single node's launcher and ranks meet."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()  # which torch would try for minutes
    except OSError as error:
        raise UserError(
            f"the ranks of this node cannot reach each other at 127.0.0.1 ({cause(error)}); give it its loopback "
            "address, as by `ip link set lo up; ip address replace 127.0.0.1/8 dev lo`"
        ) from None
    return Endpoint("127.0.0.1", 0)


def _serve(endpoint: Endpoint) -> TCPStore | None:
    """Open the store in which all nodes meet; None if the port is taken, perhaps by a launcher on this node."""
    raise_open_files()
    try:
        # Multi-tenant: torchrun opens the same store again, and so needs no second port.
        return TCPStore(endpoint.host, endpoint.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            return None
        reason = first_line(error)
        raise UserError(f"nodes cannot meet at {endpoint} ({reason}); give another --rdzv-endpoint") from None


def _connect(endpoint: Endpoint, deadline: float, answer_s: float, another: str) -> TCPStore:
    """Connect to a store of another process; torch's client would wait for ever on a silent listener."""
    await_listener(endpoint, deadline)
    answer_s = max(1.0, min(answer_s, deadline - time.monotonic()))

    def ask() -> TCPStore | None:
        with suppress(DistError):
            return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(0, answer_s))
        return None

    if (store := call_within(answer_s, ask)) is None:
        raise UserError(f"port {endpoint.port} on {endpoint.host} is in use by another program; {another}")
    return store
