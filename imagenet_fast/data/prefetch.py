"""Fill batches in threads while earlier ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")

THREADS = "images"
"""First part of the threads' names."""

Job = Iterator[None]
"""Part of the work on a batch, in steps; it may be abandoned after any step."""


def prefetched(batches: Iterable[tuple[T, Sequence[Job]]], threads: int, depth: int) -> Generator[T, None, None]:
    """Yield each batch in order once all its jobs are done, while threads work on the next ones.

    An exception in a job is raised here when it is its batch's turn. If the iterator is closed or dropped, the threads
    end after their current step.

    Args:
        batches: Batches, each with the jobs that fill it.
        threads: Number of threads.
        depth: Number of batches that are worked on ahead of the one that is yielded.
    """
    stopped = Event()

    def work(piece: Job) -> None:
        for _ in piece:
            if stopped.is_set():
                return

    pool = ThreadPoolExecutor(threads, THREADS)
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
        pool.shutdown(wait=False, cancel_futures=True)  # no wait: the iterator may be dropped in one of these threads


def _done(batch: T, pieces: Iterable[Future[None]]) -> T:
    for piece in pieces:
        piece.result()
    return batch
