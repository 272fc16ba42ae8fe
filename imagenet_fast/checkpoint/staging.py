"""Copy a tree as it is at one moment to host memory, laid out as in a safetensors file.

The buffer is reused from one checkpoint to the next, and pinned if tensors are on a GPU. Their copies are queued on the
current stream, and the host waits for none of them. Later work of the stream may change the tensors at once, but the
stream must already have waited for earlier work of other streams on them. A stream for the copies alone would gain
nothing: the current stream would have to wait for it before the next forward, which changes batch-norm statistics.

Format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the header in
JSON, and the tensors without a gap. The library's own writer is not used. Before version 0.8 it holds the GIL while it
writes, so training would wait. It also neither syncs nor gives the error number or a checksum.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load

from imagenet_fast.checkpoint.serialization import TensorEntry, Tree, flatten_tree, unflatten_tree
from imagenet_fast.errors import first_line

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes that every version of the format has; tensors of other dtypes are stored as bytes."""

_CHUNK_BYTES = 4 << 20


class StagingBuffer:
    """Host copy of one tree after another, of which it holds the last."""

    def __init__(self) -> None:
        """Create an empty buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._bytes = 0
        self._outline: Any = None
        self._lacking: OSError | None = None
        self._entries: dict[str, Any] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    def take(self, tree: Tree) -> None:
        """Copy ``tree``; no thread may still read the previous copy. If there is no memory for it, ``chunks`` says so.

        Raises:
            TypeError: As ``flatten_tree``.
        """
        self._outline, leaves = flatten_tree(tree)
        self._lacking = None
        self._entries = {}
        self._bytes = sum(leaf.tensor.nbytes for leaf in leaves.values())
        gpus = {leaf.tensor.device for leaf in leaves.values() if leaf.tensor.is_cuda}
        if len(self._buffer) < self._bytes or (gpus and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the previous buffer first
            try:
                self._buffer = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=bool(gpus))
            except RuntimeError as error:
                self._lacking = OSError(errno.ENOMEM, f"no {'pinned ' * bool(gpus)}memory: {first_line(error)}")
                return
        start = 0
        # Largest elements first, so that each tensor begins at a multiple of its element size.
        for name, leaf in sorted(leaves.items(), key=lambda item: (-item[1].tensor.element_size(), item[0])):
            stop = start + leaf.tensor.nbytes
            place = self._buffer[start:stop].view(leaf.tensor.dtype).as_strided(leaf.tensor.shape, leaf.strides)
            place.copy_(leaf.tensor, non_blocking=leaf.tensor.is_cuda)
            self._entries[name] = _entry(leaf) | {"data_offsets": [start, stop]}
            start = stop
        self._copied = {
            gpu: torch.cuda.current_stream(gpu).record_event(torch.cuda.Event(blocking=True)) for gpu in gpus
        }

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file piece by piece, once the copy is complete. Raises OSError if there was no memory for it."""
        if self._lacking is not None:
            raise self._lacking
        for gpu, event in self._copied.items():
            with torch.cuda.device(gpu):  # else the writer's thread would make a context of 500 MB on GPU 0
                event.synchronize()
        header = json.dumps({"__metadata__": {"tree": json.dumps(self._outline)}, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        yield struct.pack("<Q", len(header)) + header
        data = self._buffer.numpy().data
        for start in range(0, self._bytes, _CHUNK_BYTES):
            yield data[start : min(start + _CHUNK_BYTES, self._bytes)]


def _entry(leaf: TensorEntry) -> dict[str, Any]:
    """Return a tensor's entry in the header: its dtype, and its shape in memory order, where channels may be last."""
    tensor, strides = leaf
    if tensor.dtype not in _CODES:
        return {"dtype": "U8", "shape": [tensor.nbytes]}
    outermost_first = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return {"dtype": _CODES[tensor.dtype], "shape": [tensor.shape[dim] for dim in outermost_first]}


def read_tree(data: bytes, device: torch.device) -> Tree:
    """Read the tree in the bytes of a file.

    Args:
        data: The whole file.
        device: Device for tensors that were on an accelerator.

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
