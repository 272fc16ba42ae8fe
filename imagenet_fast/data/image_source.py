"""Define the interface through which loaders read images, whatever their format on disk."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ImageDecodeError(Exception):
    """Error for bytes that are no image, or not a whole one. The message gives the reason in a few words."""


def digest_of(*parts: bytes | NDArray[np.int64]) -> str:
    """Return a hex digest of the ``parts`` that tell a split from others."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else part.astype("<i8").tobytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class ImageSource(Protocol):
    """The images of a split, numbered from 0 in an order that never changes."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels, int64 [images]: indices into ``classes``."""

    @property
    def classes(self) -> list[str]:
        """Names of all classes of the training split."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def digest(self) -> str:
        """Return a digest of all names and labels in order; it does not depend on where the data lies."""

    def name(self, index: int) -> str:
        """Return how messages name image ``index``: by its path, or by its place in a shard."""

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image ``index``. Thread-safe."""

    def pixels(self, index: int) -> NDArray[np.uint8] | None:
        """Return the pixels of image ``index`` if they are stored, read-only; None if it must be decoded."""

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Announce that these images will be read next, so that a file server can be asked for all of them."""
