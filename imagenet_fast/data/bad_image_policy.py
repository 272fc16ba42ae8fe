"""What is shown in place of an image that turns out to be bad.

With ``data.on_bad_image`` "fail" nothing is, and the run ends with its name. With "skip" a batch keeps its size: in
training another image takes the place, with its label and the bad one's window and flip. Which one is a function of
(seed, epoch, image), so it is the same on any number of ranks. In an evaluation no other can stand for it: a bad
image is black and has the label -1, which no guess equals. So it counts, and counts as wrong.
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
"""The label of an image that is not there."""

_ATTEMPTS = 100


@dataclass(slots=True)
class LoadedImage(Generic[T]):
    """What is shown, in a place that another image may have been meant for."""

    made: T
    index: int
    label: int


class BadImagePolicy:
    """Of the ``images`` that one rank reads in ``order``. Many threads may ask at once."""

    def __init__(self, images: ImageSource, order: Order, data: ImageData) -> None:
        self._images = images
        self._order = order
        self._skips = data.on_bad_image == "skip"
        self._bad: set[int] = set()
        self._lock = Lock()

    def usable(self, index: int, epoch: int, make: Callable[[int], T]) -> LoadedImage[T] | None:
        """What ``make`` makes of image ``index``, or of another one where it is bad; None where none can be.

        It is bad where ``make`` raises ImageDecodeError, or OSError as it cannot be read. Raises UserError where it is
        and must not be, or where all seem to be.
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
            except UserError as error:  # a shard's own sentence, of where it is damaged
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
        """Image ``index`` is bad: it "cannot be read", say. Raises UserError where none may be."""
        sentence = f"{self._images.name(index)} {fault}"
        if not self._skips:
            raise UserError(
                f"{sentence}; replace the file or take it away, or go on without it by --set data.on_bad_image=skip"
            ) from None
        instead = "another is shown instead" if isinstance(self._order, TrainSampler) else "it counts as wrong"
        with self._lock:  # told under it too: the counts come in their order
            if index not in self._bad:
                self._bad.add(index)
                warn(f"{sentence}: {instead}; bad images so far on this rank: {len(self._bad)}")

    def _candidates(self, index: int, epoch: int) -> Iterator[int]:
        yield index
        if isinstance(self._order, TrainSampler):
            for attempt in range(_ATTEMPTS):
                drawn = bits("substitute", self._order.seed, epoch, attempt, of=index)[0]
                yield int(drawn) % len(self._images)
