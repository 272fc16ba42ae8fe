"""Batches that threads fill while others are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")

Job = Iterator[None]
"""A part of the work on a batch, step by step: it may be left unfinished after any of them."""


def prefetched(batches: Iterable[tuple[T, Sequence[Job]]], threads: int, depth: int) -> Generator[T, None, None]:
    """Each batch once all its pieces are done, in the order given; ``threads`` are up to ``depth`` batches ahead.

    What is raised in a piece is raised here, in the turn of its batch. When the iterator is closed, or dropped, its
    threads end after the step they are at.
    """
    stopped = Event()

    def work(piece: Job) -> None:
        for _ in piece:
            if stopped.is_set():
                return

    pool = ThreadPoolExecutor(threads, "images")
    begun: deque[tuple[T, list[Future[None]]]] = deque()
    try:
        for batch, pieces in batches:
            begun.append((batch, [pool.submit(work, piece) for piece in pieces]))
            if len(begun) > depth:
                yield _done(*begun.popleft())
        while begun:
            yield _done(*begun.popleft())
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)  # it may be one of them that drops the iterator


def _done(batch: T, pieces: Iterable[Future[None]]) -> T:
    for piece in pieces:
        piece.result()
    return batch
