"""Messages between ranks, on the board of their store: what one tells all, and what all wait for.

No backend's time limit counts there: whoever ranks wait for may take as long as it makes progress.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from imagenet_fast.distributed.board import Board, wait_until
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import JobAborted, UserError

_NFS_TIMEOUT_S = 5.0  # for another node's file to become visible over NFS
_numbers = count()  # of messages between ranks so far, on every rank alike


def from_main(message: Any = None) -> Any:
    """Return rank 0's ``message``, which JSON can hold, on every rank; that of others is ignored."""
    board, key = _board(), f"{next(_numbers)}"
    if dist.get_rank() == 0:
        board.post(key, [message])
        return message
    with here.waiting():
        return board.read(key, math.inf)[0]


def to_main(message: Any = None) -> list[Any]:
    """Return the ``message`` of each rank on rank 0; an empty list on others, which do not wait."""
    board, folder = _board(), f"{next(_numbers)}"
    board.post(f"{folder}/{dist.get_rank()}", [message])
    if dist.get_rank() != 0:
        return []
    with here.waiting():
        return [sent[0] for sent in board.gather(folder, range(dist.get_world_size()), math.inf).values()]


def barrier() -> None:
    """Wait for all ranks."""
    to_main()
    from_main()


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise the UserError or JobAborted of rank 0's block on every rank. Let the other ranks' blocks do nothing."""
    said = ("", False)
    try:
        yield
    except (UserError, JobAborted) as error:
        said = (str(error), isinstance(error, JobAborted))
    message, aborts = from_main(said)
    if message:
        dist.barrier()  # the store, where others may still read it, may end with rank 0
        raise (JobAborted if aborts else UserError)(message)


@contextmanager
def first_of_node(world: DistContext) -> Iterator[None]:
    """Run the block on the first rank of each node, then on the others: what it leaves on disk is there for them.

    Every rank must enter it. If the block raises UserError on a first rank, the others run it all the same.
    """
    if not world.is_local_main:
        barrier()
    try:
        yield
    except UserError:
        if world.is_local_main:
            barrier()
        raise
    if world.is_local_main:
        barrier()


def common_folder(folder: Path, world: DistContext, make: bool = False) -> Path | None:
    """Return rank 0's ``folder``; None, on every rank, if some rank does not see it.

    Args:
        folder: The directory, on rank 0; that of others does not count.
        world: This rank among all.
        make: Whether rank 0 makes the directory; its parent must exist.

    Raises:
        UserError: On every rank, if rank 0 cannot write there.
    """
    mark = Path(from_main(str(folder.absolute() / f".seen-{uuid.uuid4().hex}")))
    with raise_on_all_ranks():
        if world.is_main:
            try:
                if make:
                    folder.mkdir(exist_ok=True)
                for left in folder.glob(".seen-*"):  # by a rank 0 that was killed
                    left.unlink()
                mark.touch()
            except OSError as error:
                what = f"{folder} cannot be written ({error.strerror}); make it writable, or free space there"
                raise UserError(what) from None
    deadline = time.monotonic() + (0.0 if world.size == world.local_size else _NFS_TIMEOUT_S)
    seen = wait_until(mark.exists, deadline)
    missing = from_main(not all(to_main(seen)))
    if world.is_main:
        with suppress(OSError):
            mark.unlink()
    return None if missing else mark.parent


def _board() -> Board:
    return Board(dist.distributed_c10d._get_default_store(), "ranks")
