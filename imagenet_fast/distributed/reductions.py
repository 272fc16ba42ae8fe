"""Make and find what all ranks share: weights, batch-norm statistics, sums, errors, a directory, votes."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.board import wait_until
from imagenet_fast.distributed.groups import end_group
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import UserError

_NFS_TIMEOUT_S = 5.0  # for another node's file to become visible over NFS
_EVERY_S = 0.2  # between two votes, whatever a step takes
_MOST_STEPS = 1000


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


def broadcast_error(refusal: str, device: torch.device) -> str:
    """Return the ``refusal`` of rank 0 on every rank, or an empty string; that of other ranks is ignored."""
    said = [refusal]
    with here.waiting():
        dist.broadcast_object_list(said, src=0, device=device)
    return said[0]


@contextmanager
def raise_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Raise the UserError of rank 0's block on every rank. Let the other ranks' blocks do nothing."""
    refusal = ""
    try:
        yield
    except UserError as error:
        refusal = str(error)
    if refusal := broadcast_error(refusal, device):
        raise UserError(refusal)


@contextmanager
def first_of_node(world: DistContext) -> Iterator[None]:
    """Run the block on the first rank of each node, then on the others: what it leaves on disk is there for them.

    Every rank must enter it. If the block raises UserError on a first rank, the others run it all the same.
    """
    if not world.is_local_main:
        _barrier()
    try:
        yield
    except UserError:
        if world.is_local_main:
            _barrier()
        raise
    if world.is_local_main:
        _barrier()


def common_folder(folder: Path, world: DistContext, make: bool = False) -> Path | None:
    """Return rank 0's ``folder``; None, on every rank, if some rank does not see it.

    Args:
        folder: The directory, on rank 0; that of others does not count.
        world: This rank among all.
        make: Whether rank 0 makes the directory; its parent must exist.

    Raises:
        UserError: On every rank, if rank 0 cannot write there.
    """
    told = [str(folder.absolute()), f".seen-{uuid.uuid4().hex}", ""]
    if world.is_main:
        try:
            if make:
                folder.mkdir(exist_ok=True)
            (folder / told[1]).touch()
        except OSError as error:
            told[2] = f"{folder} cannot be written ({error.strerror}); make it writable, or free space there"
    with here.waiting():
        dist.broadcast_object_list(told, src=0, device=world.device)
    theirs, mark, refusal = told
    if refusal:
        raise UserError(refusal)
    deadline = time.monotonic() + (0.0 if world.size == world.local_size else _NFS_TIMEOUT_S)
    seen = wait_until((Path(theirs) / mark).exists, deadline)
    missing = gather_rows([float(not seen)]).any()
    if world.is_main:
        with suppress(OSError):
            (folder / mark).unlink()
    return None if missing else Path(theirs)


def _barrier() -> None:
    with here.waiting():
        dist.barrier()


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


class AsyncAnyReduce:
    """A vote of all ranks on flags, called once per step, with the same result at the same step on every rank.

    The all-reduce runs on gloo while the next steps are trained, and so needs no GPU stream. It sends 8 bytes per flag
    and 8 more, about five times a second. A flag has effect at most two votes later; with one rank at once.
    """

    def __init__(self, world: DistContext, flags: int) -> None:
        """Make a gloo group of all ranks, for ``flags`` flags."""
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if world.size > 1 else None
        self._ballot = torch.zeros(flags + 1, dtype=torch.int64)  # last: steps until the next vote
        self._under_way: dist.Work | None = None
        self._steps = 0
        self._stride = 1
        self._begun = time.perf_counter()
        self.cast = False
        """True if the last call took this rank's flags."""

    def __call__(self, *flags: bool) -> list[bool]:
        """Vote with this rank's flags; return which flags any rank has set.

        Flags are taken only if ``cast`` is True afterwards; else pass them again. All results are False at a step at
        which no result is known.
        """
        self.cast = True
        if self._group is None:
            return list(flags)
        self._steps += 1
        if self._steps < self._stride:
            self.cast = False
            return [False] * len(flags)
        heard = self._heard()
        step_s = (time.perf_counter() - self._begun) / self._steps
        self._ballot = torch.tensor([*flags, min(_MOST_STEPS, max(1, round(_EVERY_S / step_s)))])
        self._under_way = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, self._group, async_op=True)
        self._steps, self._begun = 0, time.perf_counter()
        return heard

    def close(self) -> None:
        """Wait for the last vote, and destroy the group. Call it on every rank, after the last step."""
        self._heard()
        if self._group is not None:
            end_group(self._group)

    def _heard(self) -> list[bool]:
        if self._under_way is None:
            return [False] * (len(self._ballot) - 1)
        with here.waiting():
            self._under_way.wait()
        self._under_way = None
        *heard, self._stride = self._ballot.tolist()
        return [bool(wish) for wish in heard]


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
