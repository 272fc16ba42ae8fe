"""Start fresh processes for a measurement, forked from a server that has imported what they need."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from imagenet_fast.distributed.forkserver import end_with_starter, freeze_gc, start_fork_server


def in_processes(count: int, module: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(number, *arguments)`` in ``count`` processes with one thread each.

    Args:
        count: Number of processes.
        module: Module that the fork server imports for them; it has an effect only before the first fork.
        function: A module-level function; its result must be picklable.
        *arguments: Its arguments after the process's number.

    Returns:
        The results, by number.

    Raises:
        ProcessRaisedException: A process failed (torch's exception, with the traceback of the first that failed).
    """
    start_fork_server(module)
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _process, (folder, function, arguments), nprocs=count, join=False, daemon=True, start_method="forkserver"
        )
        assert context is not None
        try:
            while not context.join():
                pass
        finally:
            for process in context.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(number)).read_bytes()) for number in range(count)]


def _process(number: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call ``function`` in this process and pickle its result into ``folder``."""
    end_with_starter()
    freeze_gc()
    torch.set_num_threads(1)
    (Path(folder) / str(number)).write_bytes(pickle.dumps(function(number, *arguments)))
