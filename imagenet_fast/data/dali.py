"""Decode, crop and resize images with NVIDIA DALI, off the training thread and on the GPU if there is one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from imagenet_fast.data.crops import crops_of
from imagenet_fast.data.device import Batch
from imagenet_fast.data.loader import NO_CLASS, BadImagePolicy, Job, prefetched, shared_out
from imagenet_fast.data.order import BatchIndices, Order, Resolution, TrainSampler, augmentation_of, resolution
from imagenet_fast.data.pixels import NO_MEMORY, EncodedImage, decode, encode, to_common_format
from imagenet_fast.data.shards import Shards
from imagenet_fast.data.source import ImageSource
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.data_config import ImageData

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


class DaliLoader:
    """Endless batches in ``order``.

    DALI's own reader would shuffle and shard, and its decoder would choose the crops. DALI gets bytes and windows
    instead. So a batch has the same pixels on any number of ranks, and a validation shard needs no padding.
    """

    def __init__(self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int) -> None:
        """Import DALI, which decodes on ``device`` with the help of CPU threads; two or three more read files."""
        try:
            from nvidia.dali import Pipeline
            from nvidia.dali.plugin.pytorch import feed_ndarray
        except ImportError:
            raise UserError(
                "data.loader is 'dali', but DALI is not installed; `pip install nvidia-dali-cuda130` (Linux), "
                "or --set data.loader=threads"
            ) from None
        self._make_pipeline = Pipeline
        self._feed = feed_ndarray
        self._images = images
        self._order = order
        self._data = data
        self._augmentation = augmentation_of(data, order)
        self._sides = images.jpeg_sides if isinstance(images, Shards) else np.zeros((len(images), 2), np.int32)
        """Heights and widths of images whose bytes are given as they are, without a look at them; 0 of others."""
        self._policy = BadImagePolicy(images, order, data)
        self._decoded: set[int] = set()
        """Indices of images that are passed as pixels, because DALI failed to decode a batch that they were in."""
        self._device = device
        self._threads = threads
        self._readers = min(max(2, threads), 3)  # threads that read: 16 took twice the CPU time (docs/notes/gpu.md)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end.

        If DALI fails to decode a batch, it is given the pixels of that batch's images by a pipeline built anew.

        Raises:
            UserError: If a bad image must not or cannot be replaced, or if DALI fails for another reason.
        """
        with closing(prefetched(map(self._begin, self._order), self._readers, self._data.prefetch)) as read:
            source = _Source(read)
            pipeline = self._pipeline(source)
            while True:
                try:
                    (images,) = pipeline.run(*self._stream())
                except RuntimeError as error:
                    if error is source.error:
                        raise
                    self._raise_unless_bad_image(str(error))
                    self._decode(source.given, str(error))
                    source = _Source(chain(source.given, read))
                    pipeline = self._pipeline(source)
                    continue
                batch = source.given.popleft()
                labels = batch.labels.to(self._device, non_blocking=True)
                yield Batch(self._to_torch(images).permute(0, 3, 1, 2), labels, batch.batch)

    def _begin(self, batch: BatchIndices) -> tuple[_DaliBatch, list[Job]]:
        """Allocate a batch and return it with the jobs that fill it, at most one per reader thread."""
        sizes = resolution(self._data, self._order, batch)
        given = _DaliBatch(batch, sizes, pinned=self._device.type == "cuda")
        places = range(len(batch.images))
        return given, [self._fill(given, places[part]) for part in shared_out(len(places), self._readers)]

    def _fill(self, given: _DaliBatch, places: range) -> Job:
        """Fill the slots ``places`` of a batch with encoded images, labels and crops, one image per step."""
        batch = given.batch._replace(images=given.batch.images[places])
        self._images.readahead(batch.images)
        labels, sides = given.labels.numpy(), []
        for place, index in zip(places, batch.images.tolist(), strict=True):
            load = self._from_pixels if given.decoded or index in self._decoded else self._encoded
            shown = self._policy.load_or_substitute(index, batch.epoch, load)
            image, labels[place] = shown or (_black(), NO_CLASS)
            given.encoded[place] = np.frombuffer(image.encoded, dtype=np.uint8)
            sides.append(image[1:])
            yield
        crops = crops_of(np.array(sides, np.int32), given.sizes, self._augmentation, batch)
        given.sides[places] = crops.resized
        if self._augmentation is None:
            given.places[places] = crops.shown[:, :, 0]
        else:
            mirrored = crops.shown[:, 1, 0] > crops.shown[:, 1, -1]
            given.sides[places, 1] = np.where(mirrored, -given.sizes.size, given.sizes.size)
            given.places[places], given.extents[places] = crops.begins, crops.lengths

    def _encoded(self, index: int) -> EncodedImage:
        encoded, (height, width) = self._images.read(index), self._sides[index].tolist()
        return EncodedImage(encoded, height, width) if height else to_common_format(encoded)

    def _from_pixels(self, index: int) -> EncodedImage:
        return encode(decode(self._images.read(index)))

    def _raise_unless_bad_image(self, error: str) -> None:
        """Raise UserError if DALI failed for a reason other than a bad image: no memory, or no usable GPU."""
        if NO_MEMORY.search(error):
            where = "the GPU" if self._device.type == "cuda" else "the node"
            raise UserError(
                f"DALI found no memory left on {where} ({_cause(error)}); take a smaller data.prefetch "
                f"({self._data.prefetch} now) or fewer images a batch, or --set data.loader=threads"
            ) from None
        if re.search(r"cudaError|CUDA (runtime|driver) API error", error):
            raise UserError(
                f"DALI cannot use the GPU ({_cause(error)}); run `imagenet-fast doctor`, or --set data.loader=threads"
            ) from None

    def _decode(self, batches: Iterable[_DaliBatch], error: str) -> None:
        """Give ``batches`` the pixels of their images, since DALI does not say which of them it cannot decode."""
        if all(batch.decoded for batch in batches):
            raise UserError(f"DALI fails ({_cause(error)}); --set data.loader=threads") from None
        for batch in batches:
            batch.decoded = True
            self._decoded.update(batch.batch.images.tolist())
            for _ in self._fill(batch, range(len(batch.encoded))):
                pass

    def _pipeline(self, source: _Source) -> Pipeline:
        """Build a pipeline that takes the batches of ``source``."""
        order = self._order
        pipeline = self._make_pipeline(
            batch_size=order.batching.micro_batch if isinstance(order, TrainSampler) else order.batch,
            num_threads=self._threads,
            device_id=self._device.index if self._device.type == "cuda" else None,
            prefetch_queue_depth=self._data.prefetch,
        )
        with pipeline:
            pipeline.set_outputs(self._graph(source))
        pipeline.build()
        return pipeline

    def _graph(self, source: _Source) -> Any:
        """Define the graph: decode a window, resize and mirror it at once; or decode the image, resize and crop it."""
        from nvidia.dali import fn, types

        gpu, settings = self._device.type == "cuda", self._data.dali
        decoding = {"device": "mixed" if gpu else "cpu", "output_type": types.RGB, "adjust_orientation": False}
        if gpu:
            decoding |= {
                "affine": False,  # DALI would tie each thread to a core, and ranks share the cores
                "jpeg_fancy_upsampling": settings.fancy_upsampling,
                "hw_decoder_load": settings.hw_decoder_load,
                "device_memory_padding": settings.device_padding_mb * 2**20,
                "host_memory_padding": settings.host_padding_mb * 2**20,
                "preallocate_width_hint": settings.preallocate_width,
                "preallocate_height_hint": settings.preallocate_height,
            }
        resize = {"interp_type": types.INTERP_TRIANGULAR}  # with DALI's antialiasing, the same as PIL's bilinear filter
        # No copy, for mixed decoders too: `given` keeps a batch until its output is out, as long as DALI asks for.
        inputs: Any = fn.external_source(source=source, num_outputs=4, no_copy=True)
        encoded, sides, place, extent = inputs
        if self._augmentation is None:
            images = fn.resize(fn.decoders.image(encoded, **decoding), size=sides, **resize)
            return fn.slice(images, start=place, shape=extent, axes=[0, 1])
        if gpu:  # an nvJPEG before 13.2, such as torchvision brings along, would leave windows to the CPU
            images = fn.slice(fn.decoders.image(encoded, **decoding), start=place, shape=extent, axes=[0, 1])
        else:
            images = fn.decoders.image_slice(encoded, start=place, shape=extent, axes=[0, 1], **decoding)
        return fn.resize(images, size=sides, **resize)

    def _to_torch(self, batch: Any) -> Tensor:
        """Return DALI's output as a tensor: the same memory on a CPU, a copy on a GPU.

        DALI does not reuse the memory. But on a GPU, kernels may still read it after the last reference is gone.
        """
        dense = batch.as_tensor()
        if self._device.type != "cuda":
            pixels: Tensor = from_dlpack(dense)
            return pixels
        tensor = torch.empty(dense.shape(), dtype=torch.uint8, device=self._device)
        self._feed(dense, tensor, *self._stream())
        return tensor

    def _stream(self) -> tuple[torch.cuda.Stream, ...]:
        """Return the CUDA stream that DALI's output is ordered on, so that the CPU does not wait; () on a CPU."""
        return (torch.cuda.current_stream(self._device),) if self._device.type == "cuda" else ()


def is_installed() -> bool:
    """Return whether DALI is installed and can be imported."""
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


class _DaliBatch:
    """One batch of inputs for DALI's graph, allocated empty and filled by jobs."""

    def __init__(self, batch: BatchIndices, sizes: Resolution, pinned: bool) -> None:
        count = len(batch.images)
        self.batch = batch
        self.sizes = sizes
        self.encoded: list[NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)] * count
        self.labels = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.sides = np.full((count, 2), sizes.size, dtype=np.float32)
        """Height and width that each whole image or window is resized to; a negative width mirrors it."""
        self.places, self.extents = np.full((2, count, 2), sizes.size, dtype=np.int32)
        """Windows: top and left, height and width. They apply before resizing if they are drawn by their area."""
        self.decoded = False
        """True if the images are passed as pixels, because DALI could not decode the files."""


class _Source:
    """Batches on their way into DALI's graph, which iterates over its inputs: images, sides, places and extents."""

    def __init__(self, batches: Iterable[_DaliBatch]) -> None:
        self._batches = batches
        self.given: deque[_DaliBatch] = deque()
        """Batches that DALI has taken and not yet returned; the loader takes them off."""
        self.error: RuntimeError | None = None
        """The error of a reader, or of pinning memory, that ended the batches; DALI raises it as if it were its own."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        try:
            for batch in self._batches:
                self.given.append(batch)
                yield batch.encoded, batch.sides, batch.places, batch.extents
        except RuntimeError as error:
            self.error = error
            raise


def _cause(error: str) -> str:
    """Return the line of DALI's error that says what happened, after those that say where."""
    return re.sub(r"(?s).*encountered:\s*", "", error).splitlines()[0]


@cache
def _black() -> EncodedImage:
    return encode(np.zeros((1, 1, 3), dtype=np.uint8))
