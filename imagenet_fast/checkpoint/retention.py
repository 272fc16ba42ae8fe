"""Manage the checkpoints of a run together: list them, make room for another, and remove old ones."""

from __future__ import annotations

import re
import shutil
from itertools import count
from pathlib import Path

from imagenet_fast.atomic_io import sync_folder
from imagenet_fast.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest

_NAME = re.compile(r"step-\d{8,}(-\d+)?")
"""The names that ``new_folder`` gives to checkpoints."""


def _folders(root: Path) -> list[Path]:
    """Return the directories that may be checkpoints or were meant to be; links and other names belong to the user.

    Raises:
        OSError: ``root`` cannot be listed.
    """
    try:
        named = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
    """Return the manifests from the newest checkpoint to the oldest, and the checkpoints that cannot be read.

    Raises:
        OSError: ``root`` cannot be listed, which must not pass for an empty directory.
    """
    found, damaged = {}, {}
    for folder in _folders(root):
        try:
            found[folder] = read_manifest(folder)
        except FileNotFoundError:
            continue
        except CorruptCheckpoint as error:
            damaged[folder] = error
    return dict(sorted(found.items(), key=lambda item: item[1].number, reverse=True)), damaged


def by_merit(found: dict[Path, Manifest]) -> list[Path]:
    """Return the evaluated checkpoints from the highest top-1 to the lowest; equal ones keep their order."""
    judged = {folder: manifest.top1 for folder, manifest in found.items() if manifest.top1 is not None}
    return sorted(judged, key=lambda folder: -judged[folder])


def new_folder(root: Path, step: int) -> Path:
    """Make an empty directory for a checkpoint of ``step``, even if one for that step exists.

    Raises:
        OSError: The directory cannot be made or synced.
    """
    root.mkdir(exist_ok=True)  # not its parent: a run whose directory was removed does not make it again
    for number in count(1):
        folder = root / (f"step-{step:08}" if number == 1 else f"step-{step:08}-{number}")
        try:
            folder.mkdir()
            break
        except FileExistsError:
            continue
    sync_folder(root.parent)
    sync_folder(root)
    return folder


def retain(root: Path, keep: int) -> None:
    """Remove old checkpoints: keep the newest, the best, and of the others the ``keep`` newest.

    A checkpoint with a damaged manifest stays, so that its cause can be found.

    Raises:
        OSError: ``root`` cannot be listed, or a checkpoint cannot be removed.
    """
    found, _ = survey(root)
    kept = [*found][:1] + by_merit(found)[:1]
    for folder in [folder for folder in found if folder not in kept][keep:]:
        remove(folder)


def sweep(root: Path) -> None:
    """Remove what killed writes and removals have left; no rank may be writing.

    Raises:
        OSError: ``root`` cannot be listed, a manifest cannot be looked for, or a directory cannot be removed.
    """
    for folder in _folders(root):
        try:
            (folder / MANIFEST).stat()  # exists() takes any error for a missing file from Python 3.14 on
        except FileNotFoundError:
            shutil.rmtree(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its manifest, so that a directory left by a kill counts as none.

    Raises:
        OSError: Some of it cannot be removed.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)
