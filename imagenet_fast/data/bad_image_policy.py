"""Replace images that cannot be read or decoded, or end the run, as ``data.on_bad_image`` sets.

With "fail", the run ends with an error that names the image. With "skip", the batch keeps its size:

- In training, another image replaces the bad one. It has its own label, but the bad image's window and flip. The
  choice is a function of (seed, epoch, image), so it is the same on any number of ranks.
- In an evaluation, no other image can replace it. A bad image is black and has the label -1, which no prediction
  equals. So it counts, as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from imagenet_fast.data.decode import ImageDecodeError
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.rng import bits
from imagenet_fast.data.sampler import Order, TrainSampler
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.data_config import ImageData

T = TypeVar("T")

NO_CLASS = -1
"""Label of an image that is missing."""

_ATTEMPTS = 100


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

        An image is bad if ``make`` raises ImageDecodeError, OSError (it cannot be read) or UserError (its shard is
        damaged).

        Args:
            index: Index of the image.
            epoch: Epoch, counted from 0.
            make: Function that loads the image of an index.

        Returns:
            The result of ``make`` with the index and label it belongs to; None for a bad image in an evaluation.

        Raises:
            UserError: If the image is bad and ``data.on_bad_image`` is "fail", or if in training all 100 replacements
                are bad too.
        """
        for candidate in self._candidates(index, epoch):
            if candidate in self._bad:
                continue
            try:
                return LoadedImage(make(candidate), candidate, int(self._images.labels[candidate]))
            except ImageDecodeError as error:
                self.exclude(candidate, f"cannot be decoded ({error})")
            except OSError as error:
                self.exclude(candidate, f"cannot be read ({error.strerror or error})")
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
                f"{sentence}; replace the file or take it away, or go on without it by --set data.on_bad_image=skip"
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
