"""Leave out the images that cannot be decoded, by the list that `data verify` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.formats.shard_reader import Shards
from imagenet_fast.data.image_source import ImageSource, digest_of
from imagenet_fast.errors import UserError

QUARANTINE = "quarantine.json"
"""File name of the list, in the data directory beside the splits."""


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

    def digest(self) -> str:
        return digest_of(self._split.digest().encode(), self._kept)

    def expect(self, indices: NDArray[np.int64]) -> None:
        self._split.expect(self._kept[indices])
