"""Leave out, or replace, images that cannot be read or decoded; or end the run, as ``data.on_bad_image`` sets.

The list of images to leave out is written by ``data verify``. For others, with "fail", the run ends with an error that
names the image. With "skip", the batch keeps its size:

- In training, another image replaces the bad one. It has its own label, but the bad image's window and flip. The
  choice is a function of (seed, epoch, image), so it is the same on any number of ranks.
- In an evaluation, no other image can replace it. A bad image is black and has the label -1, which no prediction
  equals. So it counts, as wrong.

An image whose file cannot be read is not bad: a server that is away for a moment would make every later evaluation
wrong. It is read again for some seconds, and then the run ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.formats.shard_reader import Shards
from imagenet_fast.data.image_source import ImageDecodeError, ImageSource, digest_of
from imagenet_fast.data.rng import bits
from imagenet_fast.data.sampler import Order, TrainSampler
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.data_config import ImageData

T = TypeVar("T")

NO_CLASS = -1
"""Label of an image that is missing."""

_ATTEMPTS = 100
_PAUSES_S = (0.1, 1.0, 5.0)
"""The times between tries to read an image."""


QUARANTINE = "quarantine.json"
"""File name of the list, in the data directory beside the splits."""


@dataclass(slots=True)
class LoadedImage(Generic[T]):
    """A loaded image: the requested one, or its replacement with its own index and label."""

    made: T
    index: int
    label: int


class BadImagePolicy:
    """The handling of bad images on one rank. Thread-safe."""

    def __init__(self, images: ImageSource, order: Order, data: ImageData) -> None:
        """Create the policy for the ``images`` that this rank reads in ``order``."""
        self._images = images
        self._order = order
        self._skips = data.on_bad_image == "skip"
        self._bad: set[int] = set()
        self._lock = Lock()

    def usable(self, index: int, epoch: int, make: Callable[[int], T]) -> LoadedImage[T] | None:
        """Load image ``index`` with ``make``, or a replacement if it is bad.

        An image is bad if ``make`` raises ImageDecodeError or UserError (its shard is damaged).

        Args:
            index: Index of the image.
            epoch: Epoch, counted from 0.
            make: Function that loads the image of an index.

        Returns:
            The result of ``make`` with the index and label it belongs to; None for a bad image in an evaluation.

        Raises:
            UserError: If the image cannot be read; if it is bad and ``data.on_bad_image`` is "fail"; or if in training
                all 100 replacements are bad too.
        """
        for candidate in self._candidates(index, epoch):
            if candidate in self._bad:
                continue
            try:
                made = _patiently(make, candidate)
                return LoadedImage(made, candidate, int(self._images.labels[candidate]))
            except ImageDecodeError as error:
                self.exclude(candidate, f"cannot be decoded ({error})")
            except OSError as error:
                raise UserError(
                    f"{self._images.name(candidate)} cannot be read ({error.strerror or error}); put that right and "
                    "resume, or leave such files out by `imagenet-fast data verify`"
                ) from None
            except UserError as error:  # from a damaged shard; its message says where
                if not self._skips:
                    raise
                self.exclude(candidate, f"cannot be read ({error})")
        if isinstance(self._order, TrainSampler):
            raise UserError(
                f"{self._images.name(index)} cannot be decoded, nor can any of {_ATTEMPTS} other images; look at "
                "the data with `imagenet-fast data verify`"
            )
        return None

    def exclude(self, index: int, fault: str) -> None:
        """Record that image ``index`` is bad, and warn about it once.

        Args:
            index: Index of the image.
            fault: What is wrong, to follow the image's name in a message, such as "cannot be read".

        Raises:
            UserError: If ``data.on_bad_image`` is "fail".
        """
        sentence = f"{self._images.name(index)} {fault}"
        if not self._skips:
            raise UserError(
                f"{sentence}; put a sound copy in its place, or go on without it by --set data.on_bad_image=skip"
            ) from None
        instead = "another is shown instead" if isinstance(self._order, TrainSampler) else "it counts as wrong"
        with self._lock:  # held while warning too, so that the counts are printed in order
            if index not in self._bad:
                self._bad.add(index)
                warn(f"{sentence}: {instead}; bad images so far on this rank: {len(self._bad)}")

    def _candidates(self, index: int, epoch: int) -> Iterator[int]:
        yield index
        if isinstance(self._order, TrainSampler):
            for attempt in range(_ATTEMPTS):
                drawn = bits("substitute", self._order.seed, epoch, attempt, of=index)[0]
                yield int(drawn) % len(self._images)


def _patiently(make: Callable[[int], T], index: int) -> T:
    """Return ``make(index)``, tried again for some seconds while the image cannot be read."""
    for pause in _PAUSES_S:
        try:
            return make(index)
        except OSError:
            time.sleep(pause)
    return make(index)


def quarantined(root: Path) -> dict[str, str]:
    """Return what is wrong with each listed file, by path: ``train/<class>/<file>``, or ``<shard>: <place>``.

    The result is empty if there is no list.

    Raises:
        UserError: If the list is damaged.
    """
    path = root / QUARANTINE
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        if not all(isinstance(what, str) for what in files.values()):
            raise TypeError
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is damaged; remove it, or have `data verify` write it anew") from None
    return dict(files)


def left_out(root: Path | None) -> str:
    """Return the end of a note on a run: how many files the list leaves out; empty if none. Raises UserError."""
    bad = {} if root is None else quarantined(root)
    return f"; {len(bad)} files are left out, by {root / QUARANTINE}" if root is not None and bad else ""


def prefix_of(root: Path) -> str:
    """Return the prefix of image names before the paths on the list; pathlib would change unusual names."""
    return "" if root == Path() else os.path.join(root, "")  # noqa: PTH118


def quarantine_text(files: Mapping[str, str]) -> str:
    """Return the text of the list file; it preserves names that are not valid text."""
    return json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n"


def without_quarantined(split: ImageSource, root: Path, name: str) -> ImageSource:
    """Return ``split`` without the images on the list.

    Args:
        split: All images of the split.
        root: Data directory.
        name: Name of the split, "train" or "val".

    Raises:
        UserError: If a class has no images left, or the list is damaged.
    """
    prefix = prefix_of(root)
    bad = {prefix + path for path in quarantined(root)}
    suspects: Iterable[int]
    if isinstance(split, Shards):
        suspects = split.maybe_named(bad)
    else:
        suspects = range(len(split)) if any(path.startswith(f"{prefix}{name}/") for path in bad) else ()
    left_out = [index for index in suspects if split.name(index) in bad]
    if not left_out:
        return split
    kept = np.delete(np.arange(len(split), dtype=np.int64), left_out)
    if emptied := set(split.labels.tolist()) - set(split.labels[kept].tolist()):
        raise UserError(
            f"{root / name / split.classes[min(emptied)]}: all images are in {root / QUARANTINE}; bring sound ones, "
            "or remove the class"
        )
    return _Rest(split, kept)


class _Rest:
    """The images ``kept`` of a split (indices into it), in its order."""

    def __init__(self, split: ImageSource, kept: NDArray[np.int64]) -> None:
        self._split = split
        self._kept = kept
        self.labels = split.labels[kept]
        self.classes = split.classes

    def __len__(self) -> int:
        return len(self._kept)

    def name(self, index: int) -> str:
        return self._split.name(int(self._kept[index]))

    def read(self, index: int) -> bytes:
        return self._split.read(int(self._kept[index]))

    def pixels(self, index: int) -> NDArray[np.uint8] | None:
        return self._split.pixels(int(self._kept[index]))

    def digest(self) -> str:
        return digest_of(self._split.digest().encode(), self._kept)

    def readahead(self, indices: NDArray[np.int64]) -> None:
        self._split.readahead(self._kept[indices])
