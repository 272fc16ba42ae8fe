"""Find out whether all ranks see one directory."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from imagenet_fast.distributed.board import wait_until
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import all_reduce_sum, refused_together
from imagenet_fast.errors import UserError

_NFS_TIMEOUT_S = 5.0  # for another node's file to become visible over NFS


def common_folder(folder: Path, world: DistContext, make: bool = False) -> Path | None:
    """Return rank 0's ``folder`` as this rank sees it, by its own path or by rank 0's.

    Return None, on every rank, if some rank sees it by neither path.

    Args:
        folder: Directory by this rank's path.
        world: This rank among all.
        make: Whether rank 0 makes the directory; its parent must exist.

    Raises:
        UserError: On every rank, if rank 0 cannot write there.
    """
    told = [str(folder.absolute()), uuid.uuid4().hex]
    dist.broadcast_object_list(told, src=0, device=world.device)
    mark = f".seen-{told[1]}"
    with refused_together(world.device):
        try:
            if world.is_main:
                if make:
                    folder.mkdir(exist_ok=True)
                (folder / mark).touch()
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}); make it writable, or free space there"
            ) from None
    deadline = time.monotonic() + (0.0 if world.size == world.local_size else _NFS_TIMEOUT_S)
    places = (folder.absolute(), Path(told[0]))
    seen = wait_until(lambda: next((place for place in places if (place / mark).exists()), None), deadline)
    (missing,) = all_reduce_sum(float(seen is None), device=world.device)
    if world.is_main:
        with suppress(OSError):
            (folder / mark).unlink()
    return None if missing else seen
