"""Check that all ranks read the same images: each node may keep a copy of its own."""

from __future__ import annotations

import torch.distributed as dist

from imagenet_fast.data.bad_images import QUARANTINE
from imagenet_fast.data.fingerprint import Contents, differences
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import gather_rows
from imagenet_fast.errors import UserError


def compare_data(own: Contents, world: DistContext) -> None:
    """Compare the description of this rank's images with rank 0's; a collective call.

    Ranks that permute different sets would train some images twice, leave others out or mislabel them, and end their
    epochs at different steps.

    Raises:
        UserError: On every rank, if some rank has other images than rank 0.
    """
    rank_0: list[Contents] = [own]
    with here.waiting():
        dist.broadcast_object_list(rank_0, src=0, device=world.device)
    changed = [differences(rank_0[0], own)]
    differs = gather_rows([float(bool(changed[0]))], world).flatten().tolist()
    if not any(differs):
        return
    other = differs.index(1.0)
    with here.waiting():
        dist.broadcast_object_list(changed, src=other, device=world.device)
    raise UserError(
        f"rank {other} has other images than rank 0: {' and '.join(changed[0])}; copy the same images, and the same "
        f"{QUARANTINE} if there is one, to every node"
    )
