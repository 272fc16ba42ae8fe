"""What an operation of torch's reads and writes, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.gpu_semantics.race_detector import Positions


def is_on_gpu(x: Any) -> bool:
    """Whether it is a tensor that says so."""
    return hasattr(x, "held")


def inner_of(x: Any) -> Any:
    """The values on the CPU of a tensor that says it is on the GPU; anything else as it is."""
    return x.held if is_on_gpu(x) else x


def tensors_in(value: Any) -> list[Tensor]:
    """Those in lists, tuples and dicts."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


_ROWS = {"aten::index_select": 2, "aten::index_copy_": 2, "aten::index_fill_": 2}
"""Operations on some rows of their first argument, and where their numbers stand among the arguments."""
_INDEXING = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_"})
_MASKS = (torch.bool, torch.uint8)
_SYNCHRONISING = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::is_nonzero"}
"""The host waits for how large their result is, or what it is."""


def touched(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """The tensors that an operation reads or writes, of which rows, and whether it writes."""
    name, positional, named = _schema(func)
    rows = None
    if name in _ROWS and args[1] in (0, -args[0].dim()):
        rows = inner_of(args[_ROWS[name]])
    elif name in _INDEXING:
        chosen = args[1]
        if len(chosen) == 1 and chosen[0] is not None and chosen[0].dtype not in _MASKS:
            rows = inner_of(chosen[0]).flatten()
    if name == "aten::native_batch_norm" and args[5]:  # it does not say that it writes the running statistics
        positional = [*positional[:3], "writes", "writes"]
    for way, value in [*zip(positional, args, strict=False), *((named.get(key), kwargs[key]) for key in kwargs)]:
        if way is not None:
            for x in tensors_in(value):
                yield x, rows if value is args[0] else None, way == "writes"


def asks_for_values(func: Any, args: Any) -> str | None:
    """What an operation is whose result is as large as values on the GPU say, so that the host waits for them."""
    name, _, _ = _schema(func)
    if name in _SYNCHRONISING and any(map(is_on_gpu, args)):
        return name
    if name in _INDEXING and any(is_on_gpu(x) and x.dtype in _MASKS for x in args[1]):
        return f"{name} by a mask"
    return None


@cache
def _schema(func: Any) -> tuple[str, list[str | None], dict[str, str | None]]:
    """An operation's name, and whether it reads or writes its arguments, by place and by name; None: neither, as where
    it makes a view, or looks at the shape."""
    name = func.name().partition(".")[0]
    only_shapes = name.removeprefix("aten::").startswith("new_") or name.endswith("_like")
    ways: dict[str, str | None] = {}
    for argument in func._schema.arguments:
        alias = argument.alias_info
        ways[argument.name] = "reads" if alias is None else "writes" if alias.is_write else None
    if only_shapes:
        ways = dict.fromkeys(ways)
    return name, list(ways.values()), ways


_places: dict[Any, Positions] = {}


def positions(inner: Tensor, rows: Tensor | None = None) -> Positions:
    """The bytes of a tensor in its storage, or of some of its rows."""
    if rows is not None:
        numbers = rows.numpy() % max(1, len(inner))
        first, *rest = inner.stride()
        row = _elements(tuple(inner.shape[1:]), tuple(rest), inner.storage_offset())
        return _bytes(numbers.reshape(-1, 1) * first + row, inner.element_size())
    key = (inner.storage_offset(), tuple(inner.shape), tuple(inner.stride()), inner.element_size())
    if key not in _places:
        size = inner.element_size()
        if inner.is_contiguous() or (inner.dim() == 4 and inner.is_contiguous(memory_format=torch.channels_last)):
            begin = inner.storage_offset() * size
            _places[key] = slice(begin, begin + inner.nbytes)
        else:
            _places[key] = _bytes(_elements(key[1], key[2], key[0]), size)
    return _places[key]


def _elements(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
    places = np.full(shape, offset, np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        places += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return places.ravel()


def _bytes(elements: Any, size: int) -> Any:
    return (np.unique(elements)[:, None] * size + np.arange(size)).ravel()
