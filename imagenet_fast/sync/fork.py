"""Forks of the process, which have none of the threads that pools need: they read the models, and train no further."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache

from imagenet_fast.sync.comm_stream import open_streams
from imagenet_fast.sync.contract import StepState, pools
from imagenet_fast.sync.gradient_step import Owner

_held: list[Owner] = []  # whose locks this process holds while it forks


@cache
def fork_settled() -> None:
    """Have this process carry out what is deferred before it forks, and the fork know that its pools are another's."""
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)


def _before() -> None:
    for pool in sorted(pools, key=id):  # in one order for two threads that fork
        pool.lock.acquire()  # no other thread is in the pool meanwhile
        _held.append(pool)
        with suppress(Exception):  # who reads the parameter is told
            pool.settle()


def _after() -> None:
    held, _held[:] = _held[:], []
    for pool in held:
        pool.lock.release()


def _after_in_child() -> None:
    for pool in _held:
        pool.current.state = StepState.FORKED
    open_streams.clear()  # whose ends would wait for threads that are not here
    _after()
