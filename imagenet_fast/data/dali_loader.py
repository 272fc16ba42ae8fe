"""NVIDIA DALI: decodes, crops and resizes off the training thread; on the GPU where there is one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from imagenet_fast.data.augmentation import augmentation_of
from imagenet_fast.data.bad_image_policy import NO_CLASS, BadImagePolicy
from imagenet_fast.data.decode import EncodedImage, ImageDecodeError, decode, encode, to_common_format
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.data.resize import middle_of, scaled_size
from imagenet_fast.data.resolution import Resolution, resolution
from imagenet_fast.data.sampler import BatchIndices, Order, TrainSampler
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.data_config import ImageData

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


class DaliLoader:
    """Batches in ``order``, without end: images uint8 [n, 3, S, S] in channels_last memory, labels int64 [n].

    DALI's own reader would shuffle and shard, and its decoder would choose what to crop; bytes and windows are given to
    it instead, so that the same pixels make up a batch on any number of ranks and a validation shard needs no padding.
    """

    def __init__(self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int) -> None:
        try:
            from nvidia.dali import Pipeline
            from nvidia.dali.plugin.pytorch import feed_ndarray
        except ImportError:
            raise UserError(
                "data.loader is 'dali', but DALI is not installed; `pip install nvidia-dali-cuda130` (Linux), "
                "or --set data.loader=folder"
            ) from None
        self._make_pipeline = Pipeline
        self._feed = feed_ndarray
        self._images = images
        self._order = order
        self._data = data
        self._chance = augmentation_of(data, order)
        self._substitution = BadImagePolicy(images, order, data)
        self._decoded: frozenset[int] = frozenset()
        """Images that DALI is given as pixels, since it could not decode all of the batch that they were in."""
        self._device = device
        self._threads = threads
        self._readers = max(2, threads)  # of files: mostly they wait, for a network perhaps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with closing(prefetched(map(self._begin, self._order), self._readers, self._data.prefetch)) as read:
            given: deque[_Given] = deque()
            pipeline = self._pipeline(read, given)
            while True:
                try:
                    (images,) = pipeline.run(*self._stream())
                except RuntimeError as error:
                    self._refuse_other_than_images(str(error))
                    again = list(given)
                    given.clear()
                    self._replace_bad(again, str(error))
                    pipeline = self._pipeline(chain(again, read), given)
                    continue
                batch = given.popleft()
                yield self._to_torch(images).permute(0, 3, 1, 2), batch.labels.to(self._device, non_blocking=True)

    def _begin(self, batch: BatchIndices) -> tuple[_Given, list[Job]]:
        self._images.expect(batch.images)
        shown_at = resolution(self._data, self._order, batch.epoch)
        given = _Given(batch, shown_at, self._chance is not None, pinned=self._device.type == "cuda")
        count = len(batch.images)
        share = -(-count // self._readers)
        return given, [self._fill(given, range(count)[begin : begin + share]) for begin in range(0, count, share)]

    def _fill(self, given: _Given, places: range) -> Job:
        """With some of its images, one a step, and with what becomes of them."""
        batch = BatchIndices(given.batch.epoch, given.batch.images[places])
        numbers, labels = None, given.labels.numpy()
        if self._chance is not None:
            numbers, given.flips[places] = self._chance.draw(batch)
        for row, place in enumerate(places):
            shown = self._substitution.usable(int(batch.images[row]), batch.epoch, self._portable)
            given.indices[place] = NO_CLASS if shown is None else shown.index
            labels[place] = NO_CLASS if shown is None else shown.label
            image = _black() if shown is None else shown.made
            given.encoded[place] = np.frombuffer(image.encoded, dtype=np.uint8)
            if self._chance is not None and numbers is not None:
                window = self._chance.window(image.height, image.width, numbers[row].tolist())
                given.places[place], given.extents[place] = window[:2], window[2:]
            else:
                whole = scaled_size(image.height, image.width, given.shown_at.shorter)
                given.sides[place], given.places[place] = whole, middle_of(whole, given.shown_at.size)
            yield

    def _portable(self, index: int) -> EncodedImage:
        encoded = self._images.read(index)
        return encode(decode(encoded)) if index in self._decoded else to_common_format(encoded)

    def _refuse_other_than_images(self, error: str) -> None:
        """Raise UserError where DALI has failed at something that no other image would mend."""
        if re.search(r"out of memory|bad_alloc", error, re.IGNORECASE):
            where = "the GPU" if self._device.type == "cuda" else "the machine"
            raise UserError(
                f"DALI found no memory left on {where} ({error.splitlines()[0]}); take a smaller data.prefetch "
                f"({self._data.prefetch} now) or fewer images a batch, or --set data.loader=folder"
            ) from None
        if re.search(r"cudaError|CUDA (runtime|driver) API error", error):
            raise UserError(
                f"DALI cannot use the GPU ({error.splitlines()[0]}); run `imagenet-fast doctor`, or "
                "--set data.loader=folder"
            ) from None

    def _replace_bad(self, batches: list[_Given], error: str) -> None:
        """In ``batches``, of which DALI could not decode an image, and does not say which: bad ones by others; where
        there is none, all by their pixels, as others can decode them. Raises UserError where a bad one must not be
        replaced, or pixels are not taken either."""
        found = False
        for batch in batches:
            for place, encoded in enumerate(batch.encoded):
                try:
                    decode(encoded.tobytes())
                except ImageDecodeError as reason:
                    self._substitution.exclude(int(batch.indices[place]), f"cannot be decoded ({reason})")
                    self._refill(batch, range(place, place + 1))
                    found = True
        if found:
            return
        shown = [index for batch in batches for index in batch.indices.tolist() if index != NO_CLASS]
        first = f"in the batch of {self._images.name(shown[0])} or soon after" if shown else "at once"
        if all(batch.decoded for batch in batches):
            raise UserError(f"DALI fails {first} ({error.splitlines()[0]}); --set data.loader=folder") from None
        warn(f"DALI cannot decode an image that others can, {first}: it is given the pixels of these images")
        self._decoded |= frozenset(shown)
        for batch in batches:
            self._refill(batch, range(len(batch.encoded)))
            batch.decoded = True

    def _refill(self, batch: _Given, places: range) -> None:
        for _ in self._fill(batch, places):
            pass

    def _pipeline(self, batches: Iterator[_Given], given: deque[_Given]) -> Pipeline:
        """Which takes ``batches`` and notes in ``given`` what it has taken; on a CPU it reads them where they are."""

        def source() -> Iterator[tuple[Any, ...]]:
            for batch in batches:
                given.append(batch)
                yield batch.samples

        order, gpu = self._order, self._device.type == "cuda"
        pipeline = self._make_pipeline(
            batch_size=order.batching.micro_batch if isinstance(order, TrainSampler) else order.batch,
            num_threads=self._threads,
            device_id=self._device.index if gpu else None,
            prefetch_queue_depth=self._data.prefetch,
        )
        _define(pipeline, source(), self._data, self._chance is not None, gpu)
        pipeline.build()
        return pipeline

    def _to_torch(self, batch: Any) -> Tensor:
        """DALI does not use the memory again. But on a GPU it is copied: kernels may still read it when nobody holds it
        any more."""
        dense = batch.as_tensor()
        if self._device.type != "cuda":
            pixels: Tensor = from_dlpack(dense)
            return pixels
        tensor = torch.empty(dense.shape(), dtype=torch.uint8, device=self._device)
        self._feed(dense, tensor, *self._stream())
        return tensor

    def _stream(self) -> tuple[torch.cuda.Stream, ...]:
        """Where DALI's output is put in order, so that the host does not wait for it; nowhere on a CPU."""
        return (torch.cuda.current_stream(self._device),) if self._device.type == "cuda" else ()


def is_installed() -> bool:
    """Whether DALI is, and loads."""
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


class _Given:
    """A batch as DALI gets it, once it has been filled."""

    def __init__(self, batch: BatchIndices, shown_at: Resolution, crops: bool, pinned: bool) -> None:
        count = len(batch.images)
        self.batch = batch
        self.shown_at = shown_at
        self.encoded: list[NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)] * count
        self.indices = np.empty(count, dtype=np.int64)
        """Of the images that are shown."""
        self.labels = torch.empty(count, dtype=torch.int64, pin_memory=pinned)
        self.sides = np.full((count, 2), shown_at.size, dtype=np.float32)
        """That images are resized to: height and width."""
        self.places, self.extents = np.full((2, count, 2), shown_at.size, dtype=np.int32)
        """Of windows, before resizing where they are random, after it in the middle: top and left, height and width."""
        self.flips = np.empty(count, dtype=np.int32)
        self.decoded = False
        """Whether it holds decoded pixels, because DALI could not decode the files."""
        self._crops = crops

    @property
    def samples(self) -> tuple[Any, ...]:
        """What the graph takes."""
        windows = (self.encoded, self.sides, self.places, self.extents)
        return (*windows, self.flips) if self._crops else windows


@cache
def _black() -> EncodedImage:
    return encode(np.zeros((1, 1, 3), dtype=np.uint8))


def _define(pipeline: Pipeline, samples: Iterator[tuple[Any, ...]], data: ImageData, crops: bool, gpu: bool) -> None:
    """The graph: bytes -> pixels of a window, or of all -> resize -> flip, or the middle."""
    from nvidia.dali import fn, types

    decoding = {"device": "mixed" if gpu else "cpu", "output_type": types.RGB, "adjust_orientation": False}
    if gpu:
        decoding |= {
            "jpeg_fancy_upsampling": True,  # the chroma that libjpeg makes, and so the CPU's loaders
            "hw_decoder_load": data.dali.hw_decoder_load,
            "device_memory_padding": data.dali.device_padding_mb * 2**20,
            "host_memory_padding": data.dali.host_padding_mb * 2**20,
            "preallocate_width_hint": data.dali.preallocate_width,
            "preallocate_height_hint": data.dali.preallocate_height,
        }
    resize = {"interp_type": types.INTERP_TRIANGULAR}  # with its antialiasing, PIL's bilinear
    with pipeline:
        given: Any = fn.external_source(source=samples, num_outputs=5 if crops else 4, no_copy=not gpu)
        if crops:
            encoded, sides, place, extent, mirror = given
            images = fn.decoders.image_slice(encoded, start=place, shape=extent, axes=[0, 1], **decoding)
            images = fn.flip(fn.resize(images, size=sides, **resize), horizontal=mirror)
        else:
            encoded, sides, place, extent = given
            images = fn.resize(fn.decoders.image(encoded, **decoding), size=sides, **resize)
            images = fn.slice(images, start=place, shape=extent, axes=[0, 1])
        pipeline.set_outputs(images)
