"""Copy, average and gather what is on all ranks: weights, statistics of norms, numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.heartbeat import here


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
