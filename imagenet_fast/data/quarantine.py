"""Read and write the list of files that `train` and `eval` leave out; `data verify` makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError

QUARANTINE = "quarantine.json"
"""File name of the list, in the data directory beside the splits."""


def quarantined(root: Path) -> dict[str, str]:
    """Return what is wrong with each listed file, by path: ``train/<class>/<file>``, or ``<shard>: <place>``.

    It is empty if there is no list. Raises UserError if the list is damaged.
    """
    path = root / QUARANTINE
    try:
        files = json.loads(path.read_bytes())["files"]  # in any UTF, with a byte order mark or without
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


def write_quarantine(root: Path, files: Mapping[str, str]) -> None:
    """Write what is wrong with each bad file, by path; names that are not valid text are preserved."""
    text = json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n"
    atomic_write_text(root / QUARANTINE, text, fsync=True)
