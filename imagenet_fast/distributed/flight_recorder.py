"""torch's flight record of NCCL's last operations, which shows at which operation ranks diverged.

``torchfrtrace`` compares the files of all ranks. torch keeps the record by default, but writes it to the user's cache.
Its variables are named ``FR``; some code still reads the older names with ``NCCL``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import torch

_SETTINGS = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
    ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
)
_FILE, _FILE_BEFORE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def record_flights(folder: Path | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL's process groups record their last operations, and write them to ``folder`` if one never ends.

    Each rank R writes ``nccl/rank-R``. Variables that the user has set stay. Call this before the first group is made.

    Args:
        folder: Directory for the records; None leaves torch's default.
        environment: Environment in which the variables are set.
    """
    for name, before, value in _SETTINGS:
        if name not in environment and before not in environment:
            environment[name] = environment[before] = value
    if folder is not None and _FILE not in environment and _FILE_BEFORE not in environment:
        with suppress(OSError):  # a node that cannot write there leaves no record
            (folder / "nccl").mkdir(parents=True, exist_ok=True)
            environment[_FILE] = environment[_FILE_BEFORE] = str(folder / "nccl" / "rank-")


def write_flight_record(rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Write this rank's record now, if NCCL is in use: this process ends before NCCL's own watchdog would write it."""
    prefix = environment.get(_FILE, environment.get(_FILE_BEFORE))
    if prefix is None or not torch.cuda.is_available():
        return
    with suppress(OSError, RuntimeError):
        Path(f"{prefix}{rank}").write_bytes(_record())


def _record() -> bytes:
    """Return the record in use: before torch 2.15 "nccl" had its own, now it shares that of all others."""
    names = ("_dump_nccl_trace", "_dump_fr_trace")
    records: list[bytes] = [getattr(torch._C._distributed_c10d, name)() for name in names]
    return next((record for record in records if pickle.loads(record).get("entries")), records[0])
