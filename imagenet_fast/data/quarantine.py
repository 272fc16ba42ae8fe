"""Files of a data set that cannot be decoded, by the list that `data verify` leaves: nobody trains on them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.split import Split
from imagenet_fast.errors import UserError

QUARANTINE = "quarantine.json"
"""In a data directory, beside its splits."""


def quarantined(root: Path) -> dict[str, str]:
    """What is wrong with them, by path: ``train/<class>/<file>``. Nothing where nobody has looked.

    Raises UserError where the list cannot be read.
    """
    path = root / QUARANTINE
    try:
        files = json.loads(path.read_text())["files"]
        if not all(isinstance(what, str) for what in files.values()):
            raise TypeError
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is damaged; remove it, or have `data verify` write it anew") from None
    return dict(files)


def quarantine_text(files: Mapping[str, str]) -> str:
    """The list as it is written; names that are no text come through, too."""
    return json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n"


def without_quarantined(split: Split, root: Path, folder: str) -> Split:
    """``split``, which lies in ``folder`` under ``root``, but for what is on the list.

    Raises UserError where a class has nothing left, or the list cannot be read.
    """
    bad = {os.path.join(root, path) for path in quarantined(root) if path.startswith(f"{folder}/")}  # noqa: PTH118
    if not bad:
        return split
    kept = np.asarray([index for index in range(len(split)) if split.name(index) not in bad], dtype=np.int64)
    if emptied := set(split.labels.tolist()) - set(split.labels[kept].tolist()):
        name = split.classes[min(emptied)]
        raise UserError(
            f"{root / folder / name}: all pictures are in {root / QUARANTINE}; bring sound ones, or remove the folder"
        )
    return _Rest(split, kept)


class _Rest:
    """Some pictures of a split, in its order: ``kept`` are their numbers there."""

    def __init__(self, split: Split, kept: NDArray[np.int64]) -> None:
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

    def expect(self, indices: NDArray[np.int64]) -> None:
        self._split.expect(self._kept[indices])
