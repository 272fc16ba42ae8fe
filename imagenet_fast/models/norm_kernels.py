"""Training batch norm with the add and the ReLU around it, as Triton kernels for images in channels_last memory.

Images are matrices [rows, channels] here. Forward reads them for each channel's sums, and again to normalise them;
backward reads them and their gradients twice. The add, the ReLU, its mask and the sum of a block's two gradients take
no pass of their own. Sums are in fp32 and in one order: the same in every run and on every GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

_kernel = triton.jit(do_not_specialize=["rows", "parts"])  # an argument that is None makes another kernel


@triton.jit
def _relu(values):
    return tl.where(values <= 0, 0.0, values)  # keeps a NaN, as torch's does


@triton.jit
def _read(images, place, here):
    return tl.load(images + place, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _input(x, place, here, RELU: constexpr):
    return _relu(_read(x, place, here)) if RELU == "before" else _read(x, place, here)


@triton.jit
def _added(sums, c, inside, parts, P: constexpr):
    p = tl.arange(0, P)
    here = inside[:, None] & (p < parts)[None, :]
    return tl.sum(tl.load(sums + c[:, None] * parts + p[None, :], mask=here, other=0.0), 1)


@_kernel
def _sum(
    x, dy, dy2, y, masked, statistics, sums, rows, channels, span, parts, RELU: constexpr, M: constexpr, C: constexpr
):
    """Sum g and g (x - p) over a part of the rows.

    Forward, g is x - p, and p the first row: near the mean, so little cancels. Backward, p is the mean, and g the
    gradient before the ReLU. After an add the ReLU's sign is that of y, and g is written: it is the shortcut's, too.
    """
    c, part, m = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1), tl.arange(0, M)
    inside = c < channels
    base = (part * span).to(tl.int64) * channels
    if dy is None:
        p = _input(x, c, inside, RELU)[None, :]
    else:
        p, scale = _read(statistics, c, inside)[None, :], _read(statistics + channels, c, inside)[None, :]
        shift = _read(statistics + 2 * channels, c, inside)[None, :]
    total, product = tl.zeros((M, C), tl.float32), tl.zeros((M, C), tl.float32)
    for at in range(0, span, M):
        here = (part * span + at + m < rows)[:, None] & inside[None, :]
        place = (at + m)[:, None] * channels + c[None, :]
        value = _input(x + base, place, here, RELU) - p
        g = value
        if dy is not None:
            g = _read(dy + base, place, here)
            if dy2 is not None:
                g += _read(dy2 + base, place, here)
            if y is not None:
                g = tl.where(_read(y + base, place, here) <= 0, 0.0, g)
                tl.store(masked + base + place, g, mask=here)
                g = g.to(masked.dtype.element_ty).to(tl.float32)
            elif RELU == "after":
                g = tl.where(value * scale + shift <= 0, 0.0, g)
        g = tl.where(here, g, 0.0)
        total += g
        product += g * value
    tl.store(sums + c * parts + part, tl.sum(total, 0), mask=inside)
    tl.store(sums + (channels + c) * parts + part, tl.sum(product, 0), mask=inside)


@_kernel
def _finish_statistics(
    x, sums, weight, bias, running_mean, running_var, batches, statistics, momentum, eps, rows, channels, parts,
    RELU: constexpr, P: constexpr, K: constexpr,
):  # fmt: skip
    """Write the mean, scale, shift and 1 / deviation of K channels, and move their running statistics."""
    c = tl.program_id(0) * K + tl.arange(0, K)
    inside = c < channels
    offset = _added(sums, c, inside, parts, P) / rows
    variance = _relu(_added(sums + channels * parts, c, inside, parts, P) / rows - offset * offset)
    mean, rstd = _input(x, c, inside, RELU) + offset, 1 / tl.sqrt(variance + eps)
    scale, shift = rstd, tl.zeros_like(rstd)
    if weight is not None:
        scale, shift = rstd * _read(weight, c, inside), _read(bias, c, inside)
    tl.store(statistics + c, mean, mask=inside)
    tl.store(statistics + channels + c, scale, mask=inside)
    tl.store(statistics + 2 * channels + c, shift, mask=inside)
    tl.store(statistics + 3 * channels + c, rstd, mask=inside)
    old_mean, old_var = _read(running_mean, c, inside), _read(running_var, c, inside)
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=inside)
    tl.store(running_var + c, old_var + momentum * (variance * (rows / (rows - 1.0)) - old_var), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@_kernel
def _finish_gradients(sums, statistics, dweight, dbias, rows, channels, parts, P: constexpr, K: constexpr):
    c = tl.program_id(0) * K + tl.arange(0, K)
    inside = c < channels
    tl.store(dbias + c, _added(sums, c, inside, parts, P), mask=inside)
    product = _added(sums + channels * parts, c, inside, parts, P)
    tl.store(dweight + c, product * _read(statistics + 3 * channels, c, inside), mask=inside)


@_kernel
def _apply(
    x, other, out, statistics, dweight, dbias, rows, channels, span, parts, RELU: constexpr, M: constexpr, C: constexpr
):
    """Write the output, to which ``other`` is added; or, with gradients, the gradient of the input from ``other``."""
    c, part, m = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1), tl.arange(0, M)
    inside = c < channels
    base = (part * span).to(tl.int64) * channels
    mean, scale = _read(statistics, c, inside)[None, :], _read(statistics + channels, c, inside)[None, :]
    shift = _read(statistics + 2 * channels, c, inside)[None, :]
    if dweight is not None:
        slope = -scale * (_read(dweight, c, inside) * _read(statistics + 3 * channels, c, inside) / rows)[None, :]
        constant = -scale * (_read(dbias, c, inside) / rows)[None, :]
    for at in range(0, span, M):
        here = (part * span + at + m < rows)[:, None] & inside[None, :]
        place = (at + m)[:, None] * channels + c[None, :]
        value = _input(x + base, place, here, RELU)
        result = (value - mean) * scale + shift
        if dweight is not None:
            g = _read(other + base, place, here)
            if RELU == "after":
                g = tl.where(result <= 0, 0.0, g)
            result = scale * g + slope * (value - mean) + constant
            if RELU == "before":
                result = tl.where(value <= 0, 0.0, result)
        else:
            if other is not None:
                result += _read(other + base, place, here)
            if RELU == "after":
                result = _relu(result)
        tl.store(out + base + place, result, mask=here)


@cache
def _launchers(rows: int, channels: int) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """Return the parts of rows, by the shape alone, and what launches kernels on parts of images, and on channels."""
    c = min(128, triton.next_power_of_2(channels))
    m, columns = 4096 // c, triton.cdiv(channels, c)  # a program has 4096 elements in registers at a time
    span = m * triton.cdiv(triton.cdiv(rows, m), max(1, 1024 // columns))  # about 1024 programs, or fewer
    parts = triton.cdiv(rows, span)
    p = triton.next_power_of_2(parts)

    def on_parts(kernel: Any, *arguments: object, relu: str) -> None:
        kernel[columns, parts](*arguments, rows, channels, span, parts, RELU=relu, M=m, C=c, num_warps=8)

    def on_channels(kernel: Any, *arguments: object, **options: object) -> None:
        k = max(1, 2048 // p)
        kernel[(triton.cdiv(channels, k),)](*arguments, rows, channels, parts, P=p, K=k, **options)

    return parts, on_parts, on_channels


class FusedNorm(torch.autograd.Function):
    """The norm of ``FusedBatchNorm2d`` in training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor, norm: Any) -> Any:
        """Return what ``norm`` computes of ``x`` and ``residual``, and move its running statistics."""
        channels = x.size(1)
        parts, on_parts, on_channels = _launchers(x.numel() // channels, channels)
        sums, statistics = (x.new_empty(2, n, channels, dtype=torch.float32) for n in (parts, 2))
        y, running = torch.empty_like(x), (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        on_parts(_sum, x, None, None, None, None, None, sums, relu=norm.relu)
        given = x, sums, weight, bias, *running, statistics, norm.momentum, norm.eps
        on_channels(_finish_statistics, *given, RELU=norm.relu)
        if residual is not None:
            residual = residual.expand_as(x).contiguous(memory_format=torch.channels_last)
        on_parts(_apply, x, residual, y, statistics, None, None, relu=norm.relu)
        ctx.save_for_backward(x, None if residual is None else y, statistics)
        ctx.relu, ctx.affine = norm.relu, weight is not None
        return (y, y.view_as(y)) if norm.forks and residual is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of what ``forward`` was called with."""
        x, y, statistics = ctx.saved_tensors
        channels = x.size(1)
        parts, on_parts, on_channels = _launchers(x.numel() // channels, channels)
        dy, dy2 = (*(one.contiguous(memory_format=torch.channels_last) for one in gradients), None)[:2]
        sums, dweight, dbias = (x.new_empty(n, channels, dtype=torch.float32) for n in (2 * parts, 1, 1))
        dx, g = torch.empty_like(x), dy if y is None else torch.empty_like(x)
        on_parts(_sum, x, dy, dy2, y, g, statistics, sums, relu=ctx.relu)
        on_channels(_finish_gradients, sums, statistics, dweight, dbias)
        on_parts(_apply, x, g, dx, statistics, dweight, dbias, relu=ctx.relu if y is None else "none")
        return dx, None if y is None else g, *((dweight[0], dbias[0]) if ctx.affine else (None, None)), None
