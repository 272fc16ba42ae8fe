"""The checkpoints of a run beside one another: which are there, room for another, which go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from imagenet_fast.checkpoint.durable_io import sync_folder
from imagenet_fast.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest

_NONE_YET = ".none-yet"


def _folders(root: Path) -> list[Path]:
    """What may be a checkpoint, or have been meant for one. A link is somebody's own. Raises OSError."""
    try:
        named = [path for path in root.iterdir() if path.name.startswith("step-")]
    except FileNotFoundError:
        return []
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
    """What the manifests say, from the newest checkpoint to the oldest; and those that cannot be read. Raises OSError
    where one cannot even look, which is not to be taken for an empty directory."""
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
    """Those that were evaluated, from the highest top-1 to the lowest; among equal ones in the order given."""
    judged = {folder: manifest.top1 for folder, manifest in found.items() if manifest.top1 is not None}
    return sorted(judged, key=lambda folder: -judged[folder])


def new_folder(root: Path, step: int) -> Path:
    """An empty directory for a checkpoint of ``step``, of which there may be one already. Raises OSError."""
    root.mkdir(exist_ok=True)  # not what it is in: a run whose directory was removed does not make it anew
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


def expect_first(root: Path) -> None:
    """Note in ``root`` that no checkpoint of its run is complete. Raises OSError."""
    (root / _NONE_YET).touch()


def first_is_there(root: Path) -> None:
    """Take that note away. Raises OSError."""
    (root / _NONE_YET).unlink(missing_ok=True)


def had_none(root: Path) -> bool:
    """Tell whether ``root`` still has the note of :func:`expect_first`: no checkpoint was ever complete there. Without
    the note and without checkpoints, some may have been lost."""
    return (root / _NONE_YET).exists()


def retain(root: Path, keep: int, is_whole: Callable[[Path, Manifest], bool]) -> list[Path]:
    """Remove all but the newest checkpoint, the best one that is whole, and of the others the ``keep`` newest. Returns
    what was removed. Raises OSError.

    What has a damaged manifest stays, for whoever looks why, as does what would be the best and is damaged otherwise.
    """
    found, _ = survey(root)
    kept = [*found][:1]
    for folder in by_merit(found):
        kept.append(folder)
        if is_whole(folder, found[folder]):
            break
    kept += [folder for folder in found if folder not in kept][:keep]
    old = [folder for folder in found if folder not in kept]
    for folder in old:
        remove(folder)
    return old


def set_aside(root: Path, step: int) -> int | None:
    """Have those of ``step`` and later under another name, where nobody goes on from them, if any is of an earlier
    step. The step of the newest that is left; None: there is none. Raises OSError."""
    found, _ = survey(root)
    if any(manifest.step < step for manifest in found.values()):
        for folder in [folder for folder, manifest in found.items() if manifest.step >= step]:
            aside = folder.with_name(f"spoilt-{folder.name}")
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)
            del found[folder]
        sync_folder(root)
    return next((manifest.step for manifest in found.values()), None)


def sweep(root: Path) -> None:
    """Remove what killed writes and removals have left. Nobody may be writing. Raises OSError."""
    for folder in _folders(root):
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder)


def remove(folder: Path) -> None:
    """First it is no checkpoint any more, then it is gone: killed in between, it is taken for none. Raises OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)
