"""Peak memory that a step keeps for its backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def peak_activations(step: Callable[[], object], others: Iterable[Tensor], device: torch.device) -> int:
    """Run ``step`` and return its peak memory in bytes.

    On a GPU, this is the peak of all memory that ``step`` allocates. Elsewhere, it is the peak of the tensors that
    autograd saves for backward; each storage counts once.

    Args:
        step: Forward and backward of one step.
        others: Tensors that exist anyway, such as weights and the batch; their storages are not counted.
        device: The device that ``step`` runs on.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    kept = _Kept({tensor.untyped_storage().data_ptr() for tensor in others})
    with saved_tensors_hooks(kept.keep, kept.give_back):
        step()
    return kept.peak


class _Saved:
    """A tensor saved by autograd; it is released when autograd drops this object."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """A counter of the bytes that autograd keeps, with their peak."""

    def __init__(self, others: set[int]) -> None:
        self._others = others
        self._times: Counter[int] = Counter()  # storage address -> number of saved tensors
        self._bytes = 0
        self.peak = 0

    def keep(self, tensor: Tensor) -> _Saved:
        saved, storage = _Saved(tensor), tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._others:
            self._times[place] += 1
            if self._times[place] == 1:
                self._bytes += storage.nbytes()
                self.peak = max(self.peak, self._bytes)
            weakref.finalize(saved, self._release, place, storage.nbytes())
        return saved

    def give_back(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _release(self, place: int, size: int) -> None:
        self._times[place] -= 1
        if not self._times[place]:
            self._bytes -= size
