"""Convert trees of dicts, lists, tuples, tensors and plain values to JSON and tensors, and back.

The same bits are restored: integers of any size, floats with the payload of a NaN, strings and bytes, keys that are not
strings, and the order of keys. Tensors are restored with their strides, so with their memory format. If one tensor is
in two places, it is one tensor again. A tensor that does not fill its memory, such as a slice or an expanded one, is
restored dense, in the same order of dimensions. Subclasses of dict become dicts, parameters become tensors.

What JSON does not have is an object with one key: ``$tensor``, ``$float``, ``$bytes``, ``$tuple``, ``$dict``.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Container
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any
"""None, bool, int, float, str, bytes, Tensor, and lists, tuples and dicts of trees.

Keys of dicts are anything but tensors, lists and dicts.
"""


class TensorEntry(NamedTuple):
    """A tensor, and the strides with which it fills memory without gap or overlap.

    These are its own strides if it does so, else strides in the same order.
    """

    tensor: Tensor
    strides: tuple[int, ...]


def flatten_tree(tree: Tree) -> tuple[Any, dict[str, TensorEntry]]:
    """Return the outline of ``tree``, for JSON, and its tensors under the names that the outline gives them.

    Raises:
        TypeError: A value cannot be in a tree; the message has its path.
    """
    leaves: dict[str, TensorEntry] = {}
    names: dict[Any, str] = {}

    def outline(value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is list:
            return [outline(inner, f"{path}/{place}") for place, inner in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [outline(inner, f"{path}/{place}") for place, inner in enumerate(value)]}
        if isinstance(value, dict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: outline(inner, f"{path}/{key}") for key, inner in value.items()}
            pairs = ((outline(key, f"{path}/key"), outline(inner, f"{path}/{key}")) for key, inner in value.items())
            return {"$dict": [[key, inner] for key, inner in pairs]}
        if isinstance(value, Tensor):
            tensor = value.detach()
            if type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized | tensor.is_meta:
                return _note(tensor, path)
        raise TypeError(f"{path or '/'}: a {kind.__module__}.{kind.__qualname__} has no place in a checkpoint")

    def _note(tensor: Tensor, path: str) -> dict[str, Any]:
        known = (
            tensor.device, tensor.data_ptr() if tensor.numel() else object(), tensor.dtype, tensor.shape,
            tensor.stride(), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        if known not in names:
            names[known] = name = _unused(path.removeprefix("/"), leaves)
            like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
            leaves[name] = TensorEntry(tensor, like.stride())
        note = {
            "$tensor": names[known],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(leaves[names[known]].strides),
        }
        return note if tensor.device.type == "cpu" else note | {"accelerator": True}

    return outline(tree, ""), leaves


def _unused(path: str, taken: Container[str]) -> str:
    """Return a name that any reader of UTF-8 accepts, and that no other tensor has."""
    path = path.encode(errors="replace").decode()
    name, number = path, 1
    while name in taken or name in ("", "__metadata__"):
        number += 1
        name = f"{path}~{number}"
    return name


def unflatten_tree(outline: Any, flat: dict[str, Tensor], device: torch.device) -> Tree:
    """Return the tree that ``flatten_tree`` made ``outline`` of.

    Args:
        outline: Outline of the tree.
        flat: Its tensors by name, as they lay in memory.
        device: Device for tensors that were on an accelerator; the others stay on the CPU.

    Raises:
        ValueError: The outline is none, or names what ``flat`` does not have. The same holds for the others below.
        KeyError: As ValueError.
        TypeError: As ValueError.
        RuntimeError: As ValueError.
    """
    tensors: dict[str, Tensor] = {}

    def tree(value: Any) -> Tree:
        match value:
            case {"$tensor": name}:
                if name not in tensors:
                    tensors[name] = _restored(value, flat[name]).to(device if "accelerator" in value else "cpu")
                return tensors[name]
            case {"$float": bits}:
                return struct.unpack(">d", bytes.fromhex(bits))[0]
            case {"$bytes": text}:
                return base64.b64decode(text, validate=True)
            case {"$tuple": inner}:
                return tuple(tree(item) for item in inner)
            case {"$dict": pairs}:
                return {tree(key): tree(inner) for key, inner in pairs}
            case dict():
                return {key: tree(inner) for key, inner in value.items()}
            case list():
                return [tree(inner) for inner in value]
            case _:
                return value

    return tree(outline)


def _restored(note: dict[str, Any], data: Tensor) -> Tensor:
    dtype = getattr(torch, note["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{note['dtype']} is no dtype")
    shape = torch.Size(note["shape"])
    if data.nbytes != shape.numel() * dtype.itemsize:
        raise ValueError(
            f"{note['$tensor']} has {data.numel() * data.element_size()} bytes, and not those of its shape"
        )
    return data.reshape(-1).view(dtype).as_strided(shape, note["strides"])
