"""First meeting of all ranks: wait for all, compare their settings, and choose the network interface."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from imagenet_fast.distributed.network_interfaces import Endpoint, await_listener, is_here, route_to
from imagenet_fast.distributed.rank_info import RankInfo, ranges
from imagenet_fast.distributed.store import absent, present, wait_until
from imagenet_fast.errors import UserError, exit_with_error, first_line
from imagenet_fast.recipe.job import flat_tables

_LOOK_S = 0.05  # between two looks for ranks that have arrived
_LISTED = 5  # at most, of the keys in which jobs differ
_INTERFACES = (
    "let the nodes' firewalls pass it, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to "
    "the others"
)


def rendezvous_ranks(place: RankInfo, agreed: Mapping[str, Any], join_timeout: timedelta, device: str = "cpu") -> Store:
    """Return the store at ``MASTER_ADDR:MASTER_PORT``, once every rank has arrived and all agree.

    Across nodes this also sets the interface for gloo and NCCL to the one that leads to the other nodes, unless the
    user has set it. By default gloo and NCCL take the address of the host name, which Debian maps to the loopback
    interface.

    Args:
        place: This process's rank.
        agreed: Settings that must be equal on all ranks.
        join_timeout: How long to wait for all ranks.
        device: Type of the device that this rank computes on, which must be the same on all ranks.

    Raises:
        UserError: On every rank that has arrived, if a rank is missing or the ranks disagree.
    """
    deadline = time.monotonic() + join_timeout.total_seconds()
    store = _open_store(place, join_timeout, deadline)
    records = PrefixStore("introduction", store)
    master = os.environ["MASTER_ADDR"]
    route = route_to(master) if place.is_multi_node else None
    text = json.dumps(agreed, sort_keys=True)
    record = {
        "host": socket.gethostname(),
        "address": route.address if route else None,
        "device": device,
        "job": hashlib.sha256(text.encode()).hexdigest(),
    }
    try:
        if place.is_local_main or not records.check([f"job/{record['job']}"]):  # ranks of a node are mostly told alike
            records.set(f"job/{record['job']}", text)
        records.set(f"rank/{place.rank}", json.dumps(record))
        if place.is_main:
            records.set("answer", json.dumps(_judge(records, place.size, deadline, join_timeout)))
        records.wait(["answer"], join_timeout + timedelta(seconds=5))
        answer = json.loads(records.get("answer").decode())
    except dist.DistError:
        raise UserError(
            f"rank 0 ended, or never came to {master}, before all {place.size} ranks were together; see its own output"
        ) from None
    if answer["refusal"]:
        time.sleep(10 * _LOOK_S if place.is_main else 0)  # the store may end with this process; others read first
        raise UserError(answer["refusal"])
    if place.is_multi_node and route is None and answer["elsewhere"]:  # the master's own node
        route = route_to(answer["elsewhere"])
    if route is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route.interface}")  # without "=", eth1 would match eth10 too
    return store


@contextmanager
def connecting(place: RankInfo, store: Store, join_timeout: timedelta) -> Iterator[None]:
    """Watch the block in which ranks connect to one another, and end all ranks if one cannot connect.

    A thread ends the process, with exit code 2, if another rank failed to connect, the store is lost or
    ``join_timeout`` has passed. It must be a thread, with a store client of its own, since a backend that waits for a
    connection runs no Python.

    Raises:
        UserError: If this rank cannot connect to the others.
    """
    connected = threading.Event()
    deadline = time.monotonic() + join_timeout.total_seconds()

    def watch() -> None:
        try:
            records = store.clone()
            while not connected.wait(4 * _LOOK_S):
                if records.check(["broken"]):
                    _end(records.get("broken").decode())
                if time.monotonic() > deadline:
                    _end(f"rank {place.rank} had no connection to all others after {join_timeout.total_seconds():g} s")
        except dist.DistError:
            if not connected.is_set():
                _end(f"rank {place.rank} lost the store of all ranks while they connected to one another")

    if place.size > 1:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        connected.set()
    except RuntimeError as error:
        connected.set()
        sentence = f"rank {place.rank} could not connect to the others ({first_line(error)})"
        with suppress(dist.DistError):
            store.set("broken", sentence)
            time.sleep(20 * _LOOK_S if place.is_main else 0)  # the store may end with this process: others look first
        raise UserError(f"{sentence}; {_INTERFACES}") from None


def _end(sentence: str) -> NoReturn:
    with suppress(SystemExit):
        exit_with_error(f"{sentence}; {_INTERFACES}")
    os._exit(2)


def _open_store(place: RankInfo, join_timeout: timedelta, deadline: float) -> Store:
    """Open the store at ``MASTER_ADDR:MASTER_PORT``; rank 0 holds it, unless torchrun does."""
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise UserError(f"the environment has RANK but not {' and '.join(missing)}; start the ranks with torchrun")
    try:
        master = Endpoint(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except ValueError:
        raise UserError(f"MASTER_PORT is '{os.environ['MASTER_PORT']}', not a number; correct it") from None
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = place.is_main and not shared
    if not holds:
        await_listener(master, deadline)
    try:
        store = TCPStore(master.host, master.port, is_master=holds, wait_for_workers=False, timeout=join_timeout)
    except dist.DistError as error:
        reason = first_line(error)
        if holds and not is_here(master.host):
            reason = f"{master.host} is no address of the node that has rank 0"
        raise UserError(
            f"rank {place.rank} cannot use {master} ({reason}); choose another MASTER_ADDR and MASTER_PORT, or "
            "--rdzv-endpoint HOST:PORT"
        ) from None
    # After a restart torchrun's store still has the keys of the previous attempt; a store that rank 0 holds is new. The
    # restart count is the same on all nodes only if nodes never leave or join.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"
    return PrefixStore(f"attempt-{attempt}", store)


def _judge(records: Store, size: int, deadline: float, join_timeout: timedelta) -> dict[str, str]:
    """Wait on rank 0 for all ranks and compare them.

    Return an error message, empty if there is none, and an address of a node other than rank 0's.
    """
    everyone = range(size)
    if not wait_until(partial(present, records, "rank", everyone), deadline, _LOOK_S):
        missing = ranges(absent(records, "rank", everyone))
        who = f"rank {missing} of {size} did not come within {join_timeout.total_seconds():g} s"
        return {"refusal": f"{who}; see what its node says, or wait longer with --join-timeout", "elsewhere": ""}
    ranks = [json.loads(records.get(f"rank/{rank}").decode()) for rank in range(size)]
    elsewhere = next((record["address"] for record in ranks if record["address"]), "")
    if (other := _unlike_first(ranks, "device")) is not None:
        found = [f"rank {rank} ({ranks[rank]['host']}) on {ranks[rank]['device']}" for rank in (0, other)]
        fix = "run `imagenet-fast doctor` on both nodes, or set CUDA_VISIBLE_DEVICES= on every node to train on CPUs"
        return {"refusal": f"ranks compute on devices of one type, but {' and '.join(found)}; {fix}", "elsewhere": ""}
    other = _unlike_first(ranks, "job")
    if other is None:
        return {"refusal": "", "elsewhere": elsewhere}
    ours, theirs = (flat_tables(json.loads(records.get(f"job/{ranks[rank]['job']}").decode())) for rank in (0, other))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    listed = ", ".join(f"{key} is {_said(ours, key)} and {_said(theirs, key)}" for key in keys[:_LISTED])
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    where = f"rank 0 ({ranks[0]['host']}) and rank {other} ({ranks[other]['host']})"
    sentence = f"{where} were told different things: {listed}{more}; give every node the same command"
    return {"refusal": sentence, "elsewhere": elsewhere}


def _unlike_first(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Return the first rank whose value for ``key`` differs from rank 0's, or None."""
    return next((rank for rank, record in enumerate(ranks) if record[key] != ranks[0][key]), None)


def _said(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "unset"
