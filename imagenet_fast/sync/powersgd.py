"""PowerSGD: a matrix's gradient is sent as two thin factors, and their error is added to the next gradient.

After Vogels, Karimireddy and Jaggi (arXiv 1905.13727).

A rank's matrix M, [n, m], is its gradient plus its error. P = M Q is averaged over the ranks and its columns are made
orthonormal. Then Q = Mᵀ P is averaged, and all ranks apply P Qᵀ, which is the mean of M projected on the span of P.
Each rank keeps its error, M - P Qᵀ. Q is kept too, and approaches the leading singular vectors from step to step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from imagenet_fast.recipe.sync_config import in_factors, matrix_of
from imagenet_fast.sync.comm_stream import CommOp
from imagenet_fast.sync.kept_state import Kept
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology

_OLD = 1e-6
"""Least weight of the old Q in the new one, so that a direction without any gradient is kept and not lost."""


def average_factors(
    slots: Sequence[ParamSlot], values: Tensor, topology: Topology, rank: int, memory: Kept, lane: str,
    average: Callable[[Tensor, str], Sequence[CommOp]],
) -> tuple[list[CommOp], list[CommOp]]:  # fmt: skip
    """Build the ops that average the gradients of neighbouring slots, approximated by matrices of rank ``rank``.

    Parameters that this does not make smaller are sent uncompressed, with P.

    A parameter of several dimensions is the matrix that it is in memory: its outermost dimension by all others, which
    is how the paper flattens convolutions. If a value of a message's matrices is not finite on a rank, all gradients of
    these matrices become NaN on every rank, and errors and Q stay unchanged. The error of a parameter that no rank has
    used stays unchanged too.

    Factors and errors are at least fp32. All ranks make P orthonormal from the same bits by the same operations. As
    with torch's hook, the ranks' weights stay equal to the bit only if their processors are of one kind.

    Args:
        slots: The slots.
        values: The buffer that they are places of.
        topology: The ranks.
        rank: Columns of a factor.
        memory: Errors and factors, kept from step to step; those that are missing are created.
        lane: The message's lane.
        average: Builds the ops of an all-reduce in a lane.

    Returns:
        The ops of P, then those of Q: none if no slot is compressed. Q has a lane of its own, so that it does not
        hold up P of the messages behind.
    """
    compressed = [slot for slot in slots if in_factors(*matrix_shape(slot.param), rank) < slot.param.numel()]
    message = _Message(
        [_matrix(slot, values, rank, memory) for slot in compressed],
        [values[slot.flag if slot in compressed else slot.start : slot.flag + 1] for slot in slots],  # or only flags
        topology,
    )

    def local(role: str, work: Callable[[], None]) -> CommOp:
        return CommOp(topology.stream((), role), work)

    first, second = [local(lane + "packing", message.project), *average(message.left, lane)], list[CommOp]()
    if compressed:
        own = lane + "second factor "
        second = [local(own + "packing", message.reflect), *average(message.right, own)]
    (second or first).append(local(lane + "unpacking", message.restore))
    return first, second


def _matrix(slot: ParamSlot, values: Tensor, rank: int, memory: Kept) -> _Matrix:
    shape = rows, columns = matrix_shape(slot.param)
    place = values[slot.start : slot.start + rows * columns].view(shape)
    exact = torch.promote_types(values.dtype, torch.float32)
    shapes = {kind: tuple(known.shape) for kind, known in memory.get(slot.name, {}).items()}
    if shapes != {"error": shape, "q": (rank, columns)}:  # else it is new, or perhaps of another shard
        generator = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))  # the same on every rank
        start = torch.randn(columns, rank, generator=generator, device="cpu").to(values.device, exact)
        (basis,) = _each_orthonormal([start])
        memory[slot.name] = {"error": values.new_zeros(shape, dtype=exact), "q": basis.T.contiguous()}
    whole = place if values.dtype == exact else values.new_zeros(shape, dtype=exact)
    return _Matrix(place, values[slot.flag], whole, **memory[slot.name])


@dataclass(frozen=True)
class _Matrix:
    """The tensors of one compressed parameter."""

    place: Tensor
    """View of its gradient in the pool, [n, m]."""
    flag: Tensor
    """Element of the pool: 0 if no rank has used the parameter."""
    whole: Tensor
    """M; the same tensor as ``place`` if the pool is at least fp32."""
    error: Tensor
    """The error of earlier steps, [n, m]."""
    q: Tensor
    """Qᵀ, [rank, m], so that its products go along the rows of M.

    Its rows are orthonormal. The paper's are not, but span the same space, and products with orthonormal rows fit in 16
    bits.
    """


class _Message:
    """Matrices whose factors are sent together, and the uncompressed values sent with them."""

    def __init__(self, matrices: Sequence[_Matrix], rest: list[Tensor], topology: Topology) -> None:
        exact = torch.promote_types(rest[0].dtype, torch.float32)
        self._matrices = matrices
        self._rest = rest

        def flat(tensors: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
            sizes = [math.prod(shape) for shape in tensors]
            values = rest[0].new_zeros(topology.padded(sum(sizes)), dtype=exact)
            parts = values[: sum(sizes)].split(sizes) if sizes else ()
            return values, [part.view(shape) for part, shape in zip(parts, tensors, strict=True)]

        count = len(matrices)
        lefts = [(len(matrix.place), len(matrix.q)) for matrix in matrices]
        self.left, parts = flat([*lefts, *(tuple(part.shape) for part in rest)])
        """Every P, then the uncompressed values."""
        self._p, self._rest_sent = parts[:count], parts[count:]
        self.right, self._q = flat([tuple(matrix.q.shape) for matrix in matrices])
        """Every Q."""
        self._lefts = self.left[: sum(p.numel() for p in self._p)]
        self._finite = torch.ones((), dtype=torch.bool, device=self.left.device)

    def project(self) -> None:
        """Compute P = M Q, and copy the uncompressed values."""
        with _exact_products(self.left.device):
            for matrix, p in zip(self._matrices, self._p, strict=True):
                torch.add(matrix.place, matrix.error, out=matrix.whole)
                torch.mm(matrix.whole, matrix.q.T, out=p)
        torch._foreach_copy_(self._rest_sent, self._rest)

    def reflect(self) -> None:
        """Make the mean P orthonormal, and compute Q = Mᵀ P."""
        torch.all(self._lefts.isfinite(), dim=0, out=self._finite)
        torch._foreach_copy_(self._p, _each_orthonormal(self._p))
        with _exact_products(self.left.device):
            for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
                torch.mm(p.T, matrix.whole, out=q)

    def restore(self) -> None:
        """Write the gradients P Qᵀ, of the mean Q, to the pool; keep the errors M - P Qᵀ and the next Q."""
        torch._foreach_copy_(self._rest, self._rest_sent)
        if not self._matrices:
            return
        finite = self._finite & self.right.isfinite().all()
        self.right.masked_fill_(~finite, 0.0)
        with _exact_products(self.left.device):
            for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
                told = finite & (matrix.flag != 0)
                torch.where(told, matrix.whole, matrix.error, out=matrix.error)
                matrix.error.addmm_(p.masked_fill(~told, 0.0), q, alpha=-1)
                torch.mm(p.masked_fill(~finite, math.nan), q, out=matrix.whole)
                if matrix.whole is not matrix.place:
                    matrix.place.copy_(matrix.whole)
        nexts = [
            (q / torch.linalg.vector_norm(q).clamp_min(torch.finfo(q.dtype).tiny) + _OLD * matrix.q).T
            for matrix, q in zip(self._matrices, self._q, strict=True)
        ]
        for matrix, basis in zip(self._matrices, _each_orthonormal(nexts), strict=True):
            torch.where(finite, basis.T, matrix.q, out=matrix.q)


def _each_orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis of each matrix' columns, completed where they are linearly dependent.

    Those of one shape are computed together: ResNet-50's 53 matrices would cost a GPU 50 us each and more.
    """
    alike: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(number)
    bases: dict[int, Tensor] = {}
    for numbers in alike.values():
        alone = torch.linalg.qr(torch.stack([matrices[number] for number in numbers])).Q
        bases |= zip(numbers, alone, strict=True)
    return [bases[number] for number in range(len(matrices))]


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Compute products of fp32 in fp32, also where the model may use TF32: errors do not include TF32's rounding."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def matrix_shape(param: nn.Parameter) -> tuple[int, int]:
    """Return ``matrix_of`` a parameter as it lies in memory."""
    strides = torch.empty_like(param, device="meta").stride()
    return matrix_of([size for _, size in sorted(zip(strides, param.shape, strict=True), reverse=True)])
