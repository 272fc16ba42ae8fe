"""Make and find what all ranks share: weights, batch-norm statistics, sums, messages, errors, a directory."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.board import Board, wait_until
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import JobAborted, UserError

_NFS_TIMEOUT_S = 5.0  # for another node's file to become visible over NFS
_numbers = count()  # of messages between ranks so far, on every rank alike


def broadcast_model(model: nn.Module) -> None:
    """Copy the weights and buffers of rank 0 to every rank.

    Raises:
        ValueError: One is no plain tensor, or its elements share memory.
    """
    named = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in named.items():
        if not is_plain(tensor) or torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{name} is quantised, sparse, nested, expanded or of a class of its own, and cannot be copied to "
                "other ranks; make it an ordinary tensor (dense, .contiguous()), or load the same model on every rank"
            )
    tensors = list(named.values())
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # not a set, whose order differs between ranks
        alike = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        with here.waiting():
            dist.broadcast(flat.view(torch.uint8), src=0)  # backends lack some dtypes, such as int16
        _scatter(flat, alike)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is an ordinary one, whose bytes are its values."""
    ordinary = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return ordinary and type(tensor.detach()) is Tensor


def average_batch_norms(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the running statistics of norms on every rank of ``group`` by their mean over the group.

    These are batch norms, and instance norms that track statistics. Each rank normalises by its own images, so the
    running means and variances drift apart. An evaluation or a checkpoint needs a single model.

    Args:
        model: Model whose norms are averaged in place.
        group: Process group to average over; None for all ranks.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    running = [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]
    if running:
        flat = torch.cat(running)
        with here.waiting():
            dist.all_reduce(flat, group=group)
        _scatter(flat.div_(dist.get_world_size(group)), running)


def gather_rows(own: Sequence[float]) -> Tensor:
    """Return the values of all ranks as a float64 tensor on the CPU, one row per rank.

    If the ranks also have gloo, as in ``init_distributed``, no device is waited for.
    """
    device = dist.distributed_c10d._get_object_coll_device(dist.group.WORLD)
    rows = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64, device=device)
    rows[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
    with here.waiting():
        dist.all_reduce(rows)
    return rows.cpu()


def from_main(message: Any = None) -> Any:
    """Return rank 0's ``message``, which JSON can hold, on every rank; that of others is ignored.

    As in ``to_main`` and ``barrier``, ranks wait on the board of the default store, where no backend's limit counts:
    whoever they wait for may take as long as it makes progress.
    """
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
    mark = f".seen-{uuid.uuid4().hex}"
    with raise_on_all_ranks():
        if world.is_main:
            try:
                if make:
                    folder.mkdir(exist_ok=True)
                (folder / mark).touch()
            except OSError as error:
                what = f"{folder} cannot be written ({error.strerror}); make it writable, or free space there"
                raise UserError(what) from None
    theirs, mark = from_main([str(folder.absolute()), mark])
    deadline = time.monotonic() + (0.0 if world.size == world.local_size else _NFS_TIMEOUT_S)
    seen = wait_until((Path(theirs) / mark).exists, deadline)
    missing = from_main(not all(to_main(seen)))
    if world.is_main:
        with suppress(OSError):
            (folder / mark).unlink()
    return None if missing else Path(theirs)


def _board() -> Board:
    return Board(dist.distributed_c10d._get_default_store(), "ranks")


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


class RunningMeans:
    """Means of tensors by name, to which one rank after another adds its own; of integers, as counts, the maxima."""

    def __init__(self) -> None:
        """Start without tensors."""
        self.values: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()

    def add(self, name: str, value: Tensor) -> None:
        """Add one rank's tensor of this name."""
        self._counts[name] += 1
        if (mean := self.values.get(name)) is None:
            self.values[name] = value.clone()
        elif value.is_floating_point() or value.is_complex():
            nearer = mean + (value - mean) / self._counts[name]
            self.values[name] = torch.where(mean == value, mean, nearer)  # equal values stay so, infinities too
        else:
            torch.maximum(mean, value, out=mean)
