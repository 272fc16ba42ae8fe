"""torch's record of the last operations of NCCL, for whoever wants to know at which one ranks came apart.

``torchfrtrace`` compares the files of all ranks. torch keeps the record unasked, but leaves it in the user's cache. It
calls the variables by FR, and some still by NCCL, as they were before.
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
    """Have NCCL's process groups keep their last operations, and leave them in ``folder`` where one never ends:
    ``nccl/rank-R`` each. What the user has set stays. Before the first group is made."""
    for name, before, value in _SETTINGS:
        if name not in environment and before not in environment:
            environment[name] = environment[before] = value
    if folder is not None and _FILE not in environment and _FILE_BEFORE not in environment:
        with suppress(OSError):  # a node that cannot write there has no record
            (folder / "nccl").mkdir(parents=True, exist_ok=True)
            environment[_FILE] = environment[_FILE_BEFORE] = str(folder / "nccl" / "rank-")


def write_flight_record(rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave the record now, where there is NCCL: this process ends before NCCL's own watchdog would."""
    prefix = environment.get(_FILE, environment.get(_FILE_BEFORE))
    if prefix is None or not torch.cuda.is_available():
        return
    with suppress(OSError, RuntimeError):
        Path(f"{prefix}{rank}").write_bytes(_record())


def _record() -> bytes:
    """The record of the backend in use: before torch 2.15 "nccl" has one of its own, since then that of all others."""
    names = ("_dump_nccl_trace", "_dump_fr_trace")
    records: list[bytes] = [getattr(torch._C._distributed_c10d, name)() for name in names]
    return next((record for record in records if pickle.loads(record).get("entries")), records[0])
