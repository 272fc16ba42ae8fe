"""Check that all ranks read the same images: each node may keep a copy of its own."""

from __future__ import annotations

import torch.distributed as dist

from imagenet_fast.data.bad_images import QUARANTINE
from imagenet_fast.data.fingerprint import Contents, differences
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import UserError


def compare_data(own: Contents, world: DistContext) -> None:
    """Compare the description of this rank's images with rank 0's; a collective call.

    Ranks that permute different sets would train some images twice, leave others out or mislabel them, and end their
    epochs at different steps.

    Raises:
        UserError: On every rank, if some rank has other images than rank 0.
    """
    rank_0: list[Contents] = [own]
    found: list[list[str]] = [[]] * world.size
    with here.waiting():
        dist.broadcast_object_list(rank_0, src=0, device=world.device)
        dist.all_gather_object(found, differences(rank_0[0], own))
    other = next((rank for rank, changed in enumerate(found) if changed), None)
    if other is not None:
        raise UserError(
            f"rank {other} has other images than rank 0: {' and '.join(found[other])}; copy the same images, and the "
            f"same {QUARANTINE} if there is one, to every node"
        )
