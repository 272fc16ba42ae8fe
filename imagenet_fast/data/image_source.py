"""Images as loaders see them, in whatever format it lies on the disk."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def digest_of(*parts: bytes | NDArray[np.int64]) -> str:
    """Of what tells a split from others."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else part.astype("<i8").tobytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class ImageSource(Protocol):
    """Numbered from 0 on, in an order that never changes."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """[images], indices into :attr:`classes`."""

    @property
    def classes(self) -> list[str]:
        """The names of all classes, of the training split."""

    def __len__(self) -> int: ...

    def digest(self) -> str:
        """Of the names and labels of all images, in their order: the same wherever the data lies."""

    def name(self, index: int) -> str:
        """What a person is told where image ``index`` is bad: its path, or its place in a file of many."""

    def read(self, index: int) -> bytes:
        """Image ``index``, still encoded. Many threads may ask at once."""

    def expect(self, indices: NDArray[np.int64]) -> None:
        """These images will be asked for next: what waits for a file server may begin to fetch them all."""
