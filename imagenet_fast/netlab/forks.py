"""Processes forked from a server that has imported torch once, as each would for seconds; and pools of such ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal

from imagenet_fast.distributed.cores import freeze_gc

_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_GRACE_S = 2.0  # for the answers of the other ranks after the first failure, which may have caused theirs

_progress: Connection | None = None
"""Where rank 0 writes its progress; None in all other processes."""


def start_fork_server(module: str) -> None:
    """Have the server behind multiprocessing's start method "forkserver" import ``module``.

    The server and its forks ignore the signals that stop a whole process group; the starter handles them. Python's own
    server ignores only one of them, and only once the import is done. Call this in the main thread, before the first
    process is started.
    """
    multiprocessing.set_forkserver_preload([module])
    answers = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_STOP}
    try:
        forkserver.ensure_running()
    finally:
        for number, answer in answers.items():
            signal.signal(number, answer)


def end_with_starter(worker: int = 0) -> None:
    """Make this forked process, torch's data ``worker`` perhaps, end with exit code 1 when its starter has ended.

    The kernel and torch's own data workers would watch the parent, which is the fork server; it runs as long as any of
    its children. SIGTERM to this process ends it, but a signal to the starter's process group does not reach it.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class RankError(RuntimeError):
    """A function failed on a rank: the tracebacks, or the exit codes of ranks that ended, the first to fail first."""


class ForkedRanks:
    """Processes with one thread each, until ``close`` or the first failure."""

    def __init__(
        self, count: int, begin: Callable[..., AbstractContextManager[Any]], *arguments: Any, preload: str
    ) -> None:
        """Fork the processes.

        Args:
            count: Number of processes.
            begin: Called as ``begin(number, *arguments)`` in each process: a module-level function that returns a
                context, in which all functions run.
            *arguments: Its arguments after the process's number.
            preload: Module that the fork server imports first; it has an effect only before the first fork.
        """
        start_fork_server(preload)
        context = multiprocessing.get_context("forkserver")
        self._ranks = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, number, begin, arguments), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(
        self, function: Callable[..., Any], *arguments: Any, show: Callable[[str, int, int], None] | None = None
    ) -> list[Any]:
        """Call ``function(*arguments)`` in every process and return the results, by number.

        Args:
            function: A module-level function; its result must be picklable.
            *arguments: Its arguments.
            show: Called with what process 0 reports with ``report_progress``.

        Raises:
            RankError: It failed in a process, or the process ended. The pool is closed.
        """
        assert self._ranks, "closed"
        call = pickle.dumps((function, arguments))
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {ours: number for number, (_, ours) in enumerate(self._ranks)}
        deadline = None
        try:
            for ours in waiting:
                _send(ours, call)
            while waiting and (deadline is None or time.monotonic() < deadline):
                for ready in connection.wait(list(waiting), None if deadline is None else _GRACE_S):
                    assert isinstance(ready, Connection)
                    match self._answer(waiting[ready], ready):
                        case "progress", progress:
                            if show is not None:
                                show(*progress)
                        case "result", result:
                            results[waiting.pop(ready)] = result
                        case _, text:
                            failures.append(f"rank {waiting.pop(ready)} of {len(self._ranks)} {text}")
                            deadline = deadline or time.monotonic() + _GRACE_S
        finally:
            if len(results) < len(self._ranks):
                self.close()
        if failures:
            raise RankError("\n".join(failures))
        return [results[number] for number in range(len(self._ranks))]

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        for process, ours in self._ranks:
            process.kill()
            ours.close()
        self._ranks.clear()

    def _answer(self, number: int, ours: Connection) -> tuple[Literal["result", "progress", "failure"], Any]:
        try:
            answer: tuple[Literal["result", "progress", "failure"], Any] = pickle.loads(ours.recv_bytes())
        except (EOFError, OSError):
            process = self._ranks[number][0]
            process.join(_GRACE_S)
            return "failure", f"ended with exit code {process.exitcode}"
        return answer


def report_progress(text: str, done: int, total: int) -> None:
    """Report what is done now, and that ``done`` of ``total`` is finished, to whoever called ``ForkedRanks.run``.

    Only reports of process 0 are shown. Call this between measurements, not inside.
    """
    if _progress is not None:
        _progress.send_bytes(pickle.dumps(("progress", (text, done, total))))


def _send(end: Connection, message: bytes) -> None:
    with suppress(OSError):  # it has ended, and its exit code is its answer
        end.send_bytes(message)


def _serve(end: Connection, number: int, begin: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer calls, in a process of the pool, until the other end is closed."""
    global _progress
    _progress = end if number == 0 else None
    end_with_starter()
    freeze_gc()
    import torch  # not by launchers, which import this module

    torch.set_num_threads(1)
    try:
        with begin(number, *arguments):
            while True:
                try:
                    call = end.recv_bytes()
                except EOFError:
                    return
                function, values = pickle.loads(call)
                end.send_bytes(pickle.dumps(("result", function(*values))))
    except BaseException:
        _send(end, pickle.dumps(("failure", f"failed:\n{traceback.format_exc()}")))
        raise SystemExit(1) from None
