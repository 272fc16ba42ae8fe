"""A pool of ranks for each number of them: `run` calls a function on each, and brings back what it returned.

Ranks live as long as the session. Every call is a case of its own: it begins with the same random numbers and precision
of products, has a time limit, and must leave its rank as it was, as far as `_State` sees. What it leaves behind (an
environment variable, a process group, a thread) fails the test, and the ranks are forked anew. So they are after every
failure.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import resource
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from imagenet_fast.netlab.forks import ForkedRanks, RankError
from imagenet_fast.sync.topology import Topology

LIMIT_S = 120.0
"""For a function on ranks."""

_KEPT = (2, 3, 4)
"""Numbers of ranks that stay; of all others only the last."""

_ENDING_S = 5.0  # for threads and groups that have been told to end

_pools: dict[tuple[int, str], ForkedRanks] = {}
_folder = tempfile.TemporaryDirectory(prefix="ranks-")
at_end: list[Callable[[], None]] = []
"""What the case that runs on this rank calls when it is done, one after the other."""
cpu_s = 0.0
"""Seconds of a processor that the ranks of this process have used so far, of each call those of the busiest rank."""


def run(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", fresh: bool = False,
    limit_s: float = LIMIT_S,
) -> list[Any]:  # fmt: skip
    """``function(*arguments)`` on each of ``world`` ranks of one group; the results, by rank.

    With the backend "nccl" tensors are made on a GPU by default, which ranks share where there are too few. With
    ``fresh``, ranks are forked for this call alone, which may do to its process what it likes.

    What the ranks raised is raised here as an AssertionError, the first to fail first.
    """
    global cpu_s
    pool = _fork(world, backend) if fresh else _pool(world, backend)
    try:
        cases: list[_Case] = pool.run(_case, function, arguments, limit_s, _folder.name)
    except BaseException as error:  # also when somebody presses Ctrl-C: the ranks do not hear it
        _close(pool)
        if not isinstance(error, RankError):
            raise
        stuck = [file for rank in range(world) if (file := _stack_of(rank)).exists() and file.stat().st_size]
        told = [str(error), *(f"{file.name}:\n{file.read_text()}" for file in stuck)]
        raise AssertionError("\n".join(told)) from None
    cpu_s += max(case.cpu_s for case in cases)
    left = [] if fresh else [f"rank {rank} keeps {what}" for rank, case in enumerate(cases) for what in case.left]
    if fresh or left or any(case.dropped for case in cases):
        _close(pool)
    assert not left, "\n".join(left)
    return [case.result for case in cases]


def with_ranks(count: int | None = None, fresh: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that all ranks run, with its parameters. Without a count, ``world`` is one of them, and says it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def everywhere(**parameters: Any) -> None:
            world = count or parameters["world"]
            if dist.is_initialized():
                assert dist.get_world_size() == world, "a test has left its group open"
                test(**parameters)
            else:
                run(world, partial(everywhere, **parameters), fresh=fresh)

        return everywhere

    return decorate


def _pool(world: int, backend: str) -> ForkedRanks:
    if world not in _KEPT:
        for key in [key for key in _pools if key[0] not in _KEPT and key != (world, backend)]:
            _close(_pools[key])
    if (world, backend) not in _pools:
        _pools[world, backend] = _fork(world, backend)
    return _pools[world, backend]


def _fork(world: int, backend: str) -> ForkedRanks:
    # A store in a file would do as well, but looking into it takes longer than anything that ranks do here.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool = ForkedRanks(world, _joined, world, backend, store.port, preload="tests.forked")
    weakref.finalize(pool, lambda store: None, store)  # it lives as long as the pool
    return pool


def _close(pool: ForkedRanks) -> None:
    pool.close()
    for key in [key for key, other in _pools.items() if other is pool]:
        del _pools[key]


def lending(ranks_per_node: int | None = None) -> Topology:
    """All ranks, with streams that pools use one after the other, also those of later cases: connecting takes longer
    than most of what tests do with them. Every rank must make the first call alike."""
    if ranks_per_node not in _lent:
        _lent[ranks_per_node] = Topology(torch.get_default_device(), None, ranks_per_node)
    return _lent[ranks_per_node]


_lent: dict[int | None, Topology] = {}


def _stack_of(rank: int) -> Path:
    """Where a rank that hangs writes what it does."""
    return Path(_folder.name, f"rank-{rank}")


@contextmanager
def _joined(rank: int, world: int, backend: str, port: int) -> Iterator[None]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    if backend == "nccl" and world > torch.cuda.device_count():  # NCCL reads them once a process
        # It refuses two ranks of one node on one GPU, so each says that it is on a node of its own.
        os.environ |= _SHARED | {"NCCL_HOSTID": f"host{rank}"}
    dist.init_process_group(
        backend, store=dist.TCPStore("127.0.0.1", port, wait_for_workers=False), rank=rank, world_size=world,
        timeout=timedelta(seconds=60), device_id=_take_gpu(rank) if backend == "nccl" else None,
    )  # fmt: skip
    yield


_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # since NCCL 2.30, which then minds no rank beside another
    # Other nodes are reached by sockets alone, here by the loopback interface.
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
    # Few thread blocks, and the ways that wait least for the other rank's turn on the GPU.
    "NCCL_MAX_CTAS": "2", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
}  # fmt: skip
"""The variables by which NCCL lets ranks share a GPU."""


def _take_gpu(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return device


@dataclass(frozen=True)
class _Case:
    """How a function went on one rank."""

    result: Any
    left: list[str]
    """What it left behind."""
    dropped: bool
    """Whether it gave up streams, which last until the rank ends."""
    cpu_s: float


def _case(function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float, folder: str) -> _Case:
    stack = Path(folder, f"rank-{dist.get_rank()}")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # which a step sets for its process
    random.seed(0)
    np.random.seed(0)
    before, begun = _State.now(), _cpu_s()
    with stack.open("w") as file:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        try:
            result = function(*arguments)
            while at_end:
                at_end.pop(0)()
        finally:
            faulthandler.cancel_dump_traceback_later()
    patch.stopall()
    return _Case(result, before.left_behind(), bool(Topology._dropped), _cpu_s() - begun)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class _State:
    """What the next case would find changed."""

    environment: dict[str, str]
    directory: str
    dtype: torch.dtype
    threads: int
    deterministic: bool
    gradients: bool
    process_groups: set[str]
    python_threads: set[str]

    @staticmethod
    def now() -> _State:
        names = dist.distributed_c10d._world.pg_names
        streams = [stream for topology in _lent.values() for stream in topology._streams.values()]
        groups = set(names.values()) - {names[stream._group] for stream in streams if stream._group}
        threads = {t.name for t in threading.enumerate()} - {f"comm stream {id(stream):x}_0" for stream in streams}
        return _State(
            dict(os.environ), str(Path.cwd()), torch.get_default_dtype(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
            groups, threads,
        )  # fmt: skip

    def left_behind(self) -> list[str]:
        """What is not as it was, after what is on its way out has gone."""
        deadline = time.monotonic() + _ENDING_S
        if self._runs_more():
            gc.collect()
        while self._runs_more() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._differences()

    def _runs_more(self) -> bool:
        now = _State.now()
        return bool(now.process_groups - self.process_groups or now.python_threads - self.python_threads)

    def _differences(self) -> list[str]:
        now, differences = _State.now(), []
        for name in (field.name for field in fields(self)):
            match getattr(self, name), getattr(now, name):
                case dict() as then, value:
                    changed = {key for key in then | value if then.get(key) != value.get(key)}
                    differences += [f"{name} {key}={value.get(key)}" for key in sorted(changed)]
                case set() as then, value:
                    differences += [f"{name}: {one}" for one in sorted(value - then)]
                case then, value if value != then:
                    differences.append(f"{name} {value}, not {then}")
        return differences
