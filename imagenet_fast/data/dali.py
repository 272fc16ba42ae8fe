"""NVIDIA DALI: reads, decodes, crops and normalises off the training thread; decodes on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from imagenet_fast.data.augmentation import Augmentation, augmentation_of
from imagenet_fast.data.imagefolder import ImageFolder
from imagenet_fast.data.order import Order, TrainOrder
from imagenet_fast.errors import UserError
from imagenet_fast.recipe import schema

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


class DaliLoader:
    """Batches in ``order``, without end: images fp32 [n, 3, S, S] in channels_last memory, labels int64 [n].

    DALI's own reader would shuffle and shard, and its decoder would choose what to crop; order and windows are given to
    it instead, so that the same pixels make up a batch on any number of ranks and a validation shard needs no padding.
    """

    def __init__(
        self, folder: ImageFolder, order: Order, data: schema.ImageData, device: torch.device, threads: int
    ) -> None:
        try:
            from nvidia.dali import Pipeline
            from nvidia.dali.plugin.pytorch import feed_ndarray
        except ImportError:
            raise UserError(
                "data.loader is 'dali', but DALI is not installed; `pip install nvidia-dali-cuda130` (Linux), "
                "or --set data.loader=folder"
            ) from None
        self._feed = feed_ndarray
        self._device = device
        chance = augmentation_of(data, order)
        largest = order.batching.micro_batch if isinstance(order, TrainOrder) else order.batch
        self._pipeline = Pipeline(
            batch_size=largest,
            num_threads=threads,
            device_id=device.index if device.type == "cuda" else None,
            prefetch_queue_depth=2,
        )
        _define(self._pipeline, _samples(folder, order, chance), data, chance, device.type == "cuda")
        self._pipeline.build()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            images, labels = self._pipeline.run(*self._stream())
            yield (
                self._to_torch(images, torch.float32).permute(0, 3, 1, 2),
                self._to_torch(labels, torch.int64),
            )

    def _to_torch(self, batch: Any, dtype: torch.dtype) -> Tensor:
        """Copy out of DALI's buffer, which the next run overwrites."""
        dense = batch.as_tensor()
        tensor = torch.empty(dense.shape(), dtype=dtype, device=self._device if _on_gpu(dense) else "cpu")
        self._feed(dense, tensor, *(self._stream() if tensor.is_cuda else ()))
        return tensor.to(self._device, non_blocking=True)

    def _stream(self) -> tuple[torch.cuda.Stream, ...]:
        """Where DALI's output is put in order, so that the host does not wait for it; nowhere on a CPU."""
        return (torch.cuda.current_stream(self._device),) if self._device.type == "cuda" else ()


def _on_gpu(dense: Any) -> bool:
    return "GPU" in type(dense).__name__


def _samples(folder: ImageFolder, order: Order, chance: Augmentation | None) -> Iterator[tuple[Any, ...]]:
    """What DALI is asked for next: file names as bytes, labels, and in training what chooses windows, and flips."""
    for batch in order:
        names = [np.frombuffer(folder.paths[i].encode(), dtype=np.uint8) for i in batch.pictures]
        labels = folder.labels[batch.pictures]
        if chance:
            numbers, flips = chance.draw(batch)
            yield names, labels, np.ascontiguousarray(numbers), flips.astype(np.int32)
        else:
            yield names, labels


def _windows(chance: Augmentation) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """Places and sizes [2] of the windows of a batch, from the pictures' shapes [3] and random numbers."""

    def windows(shapes: list[Any], numbers: list[Any]) -> tuple[list[Any], list[Any]]:
        sizes = np.stack(shapes)[:, :2].tolist()
        drawn = np.stack(numbers).tolist()
        chosen = [chance.window(height, width, row) for (height, width), row in zip(sizes, drawn, strict=True)]
        windows = np.array(chosen, dtype=np.int32)
        return list(windows[:, :2]), list(windows[:, 2:])

    return windows


def _define(
    pipeline: Pipeline,
    samples: Iterator[tuple[Any, ...]],
    data: schema.ImageData,
    chance: Augmentation | None,
    gpu: bool,
) -> None:
    """The graph: file -> pixels -> crop -> resize -> flip and normalise."""
    from nvidia.dali import fn, types

    size = [data.image_size, data.image_size]
    decode = {"device": "mixed" if gpu else "cpu", "output_type": types.RGB, "adjust_orientation": False}
    resize = {"interp_type": types.INTERP_TRIANGULAR}  # with its antialiasing, PIL's bilinear
    with pipeline:
        given: Any = fn.external_source(source=samples, num_outputs=4 if chance else 2)
        names, labels, *drawn = given
        encoded = fn.io.file.read(names)
        if chance:
            numbers, mirror = drawn
            windows: Any = fn.python_function(
                fn.peek_image_shape(encoded, adjust_orientation=False),
                numbers,
                function=_windows(chance),
                num_outputs=2,
                batch_processing=True,
            )
            place, extent = windows
            images = fn.decoders.image_slice(encoded, start=place, shape=extent, axes=[0, 1], **decode)
            images = fn.resize(images, size=size, **resize)
        else:
            images = fn.resize(fn.decoders.image(encoded, **decode), resize_shorter=data.resize, **resize)
            mirror = 0
        images = fn.crop_mirror_normalize(
            images,
            crop=size,
            mirror=mirror,
            mean=[255 * value for value in data.mean],
            std=[255 * value for value in data.std],
            output_layout="HWC",
            dtype=types.FLOAT,
        )
        pipeline.set_outputs(images, labels)
