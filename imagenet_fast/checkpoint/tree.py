"""Write a tree of dicts, lists, tuples, tensors and plain values as the bytes of a safetensors file, and read it.

The same values are restored: integers of any size, floats, strings, keys that are not strings, and the order of keys.
Tensors are restored with their strides, so with their memory format. If one tensor is in two places, it is one tensor
again. A tensor that does not fill its memory, such as a slice or an expanded one, is restored dense, in the same order
of dimensions. Subclasses of dict become dicts, parameters become tensors.

Format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the header in
JSON, and the tensors without a gap. The header's metadata has the outline of the tree, in which what JSON lacks is an
object with one key: ``$tensor``, ``$tuple``, ``$dict``. The library's own writer is not used.
Before version 0.8 it holds the GIL while it writes, so training would wait. It also neither syncs nor gives the error
number or a checksum.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Container, Iterator, Mapping
from itertools import count
from typing import Any, TypeAlias

import torch
from safetensors.torch import load
from torch import Tensor

from imagenet_fast.errors import first_line

Tree: TypeAlias = Any
"""None, bool, int, float, str, Tensor, and lists, tuples and dicts of trees.

Keys of dicts are anything but tensors, lists and dicts.
"""

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes that every version of the format has; tensors of other dtypes are stored as bytes."""

_CHUNK_BYTES = 4 << 20


class HostCopy:
    """Memory for a copy of one tree after another, laid out as in the file.

    It is pinned if tensors are on a GPU. Their copies are queued on the current stream, and the host waits for none of
    them. Later work of the stream may change the tensors at once, but the stream must already have waited for earlier
    work of other streams on them. A stream for the copies alone would gain nothing: the current stream would have to
    wait for it before the next forward, which changes batch-norm statistics.
    """

    def __init__(self) -> None:
        """Begin without memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, tree: Tree) -> Iterator[bytes | memoryview]:
        """Copy ``tree`` as it is now, and return the pieces of its file, for any thread until the next ``take``.

        Raises:
            OSError: There is no memory for the copy.
            TypeError: As ``flatten_tree``.
        """
        outline, tensors = flatten_tree(tree)
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._reserve(sum(tensor.nbytes for tensor in tensors.values()), pinned=bool(gpus))
        entries, start = {}, 0
        # Largest elements first, so that each tensor begins at a multiple of its element size.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            stop, strides = start + tensor.nbytes, _dense_strides(tensor)
            place = self._memory[start:stop].view(tensor.dtype).as_strided(tensor.shape, strides)
            place.copy_(tensor, non_blocking=tensor.is_cuda)
            entries[name] = _entry(tensor, strides) | {"data_offsets": [start, stop]}
            start = stop
        copied = {gpu: torch.cuda.current_stream(gpu).record_event(torch.cuda.Event(blocking=True)) for gpu in gpus}
        return self._pieces(outline, entries, start, copied)

    def _reserve(self, size: int, pinned: bool) -> None:
        if len(self._memory) >= size and (self._memory.is_pinned() or not pinned):
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the previous memory first
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            lacking = f"no {'pinned ' * pinned}memory: {first_line(error)}"
            raise OSError(errno.ENOMEM, lacking, "the copy in host memory") from None

    def _pieces(
        self, outline: Any, entries: Mapping[str, Any], size: int, copied: Mapping[torch.device, torch.cuda.Event]
    ) -> Iterator[bytes | memoryview]:
        for gpu, event in copied.items():
            with torch.cuda.device(gpu):  # else the writer's thread would make a context of 500 MB on GPU 0
                event.synchronize()
        header = json.dumps({"__metadata__": {"tree": json.dumps(outline)}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        yield struct.pack("<Q", len(header)) + header
        data = self._memory.numpy().data
        for start in range(0, size, _CHUNK_BYTES):
            yield data[start : min(start + _CHUNK_BYTES, size)]


def _entry(tensor: Tensor, strides: tuple[int, ...]) -> dict[str, Any]:
    """Return a tensor's entry in the header: its dtype, and its shape in memory order, where channels may be last."""
    if tensor.dtype not in _CODES:
        return {"dtype": "U8", "shape": [tensor.nbytes]}
    outermost_first = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return {"dtype": _CODES[tensor.dtype], "shape": [tensor.shape[dim] for dim in outermost_first]}


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it fills its memory without gap or overlap, else strides in the same order."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def read_tree(data: bytes, device: torch.device) -> Tree:
    """Return the tree in a whole file; tensors that were on an accelerator come to ``device``.

    Raises:
        ValueError: The file holds no tree.
    """
    try:
        flat = load(data)
        (length,) = struct.unpack_from("<Q", data)
        outline = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tree"])
        return unflatten_tree(outline, flat, device)
    except Exception as error:  # a damaged file may fail in the library, in the outline or in torch
        raise ValueError(f"holds no tree ({type(error).__name__}: {error})") from error


def flatten_tree(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Return the outline of ``tree``, for JSON, and its tensors under the names that the outline gives them.

    Raises:
        TypeError: A value cannot be in a tree; the message has its path.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def outline(value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple):
            items = [outline(inner, f"{path}/{place}") for place, inner in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if isinstance(value, dict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: outline(inner, f"{path}/{key}") for key, inner in value.items()}
            pairs = ((outline(key, f"{path}/key"), outline(inner, f"{path}/{key}")) for key, inner in value.items())
            return {"$dict": [[key, inner] for key, inner in pairs]}
        if isinstance(value, Tensor):
            tensor = value.detach()
            if type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized | tensor.is_meta:
                return note(tensor, path)
        raise TypeError(f"{path or '/'}: a {kind.__module__}.{kind.__qualname__} has no place in a checkpoint")

    def note(tensor: Tensor, path: str) -> dict[str, Any]:
        same = (
            tensor.device, tensor.data_ptr() if tensor.numel() else object(), tensor.dtype, tensor.shape,
            tensor.stride(), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        if same not in names:
            names[same] = _unused(path.removeprefix("/"), tensors)
            tensors[names[same]] = tensor
        noted = {
            "$tensor": names[same],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(_dense_strides(tensor)),
        }
        return noted if tensor.device.type == "cpu" else noted | {"accelerator": True}

    return outline(tree, ""), tensors


def _unused(path: str, taken: Container[str]) -> str:
    """Return a name that any reader of UTF-8 accepts, and that no other tensor has."""
    path = path.encode(errors="replace").decode()
    names = (path if number == 1 else f"{path}~{number}" for number in count(1))
    return next(name for name in names if name not in taken and name not in ("", "__metadata__"))


def unflatten_tree(outline: Any, flat: Mapping[str, Tensor], device: torch.device) -> Tree:
    """Return the tree that ``flatten_tree`` made ``outline`` of, from the memory of its tensors in ``flat``.

    Tensors that were on an accelerator come to ``device``. Any exception may come of an outline that is none.
    """
    tensors: dict[str, Tensor] = {}

    def tree(value: Any) -> Tree:
        match value:
            case {"$tensor": name}:
                if name not in tensors:
                    tensors[name] = _restored(value, flat[name]).to(device if "accelerator" in value else "cpu")
                return tensors[name]
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


def _restored(note: Mapping[str, Any], data: Tensor) -> Tensor:
    dtype = getattr(torch, note["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{note['dtype']} is no dtype")
    shape = torch.Size(note["shape"])
    if data.nbytes != shape.numel() * dtype.itemsize:
        raise ValueError(f"{note['$tensor']} has {data.nbytes} bytes, and not those of its shape")
    return data.reshape(-1).view(dtype).as_strided(shape, note["strides"])
