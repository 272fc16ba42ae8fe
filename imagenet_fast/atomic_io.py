"""Write files and directories atomically: each is there whole or not at all. And values as JSON."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError


@contextmanager
def atomic_path(path: Path, fsync: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a path beside ``path`` for a file that replaces it if the block succeeds, and is removed otherwise.

    Args:
        path: The final file.
        fsync: Whether the file must survive a power failure.
        shared: Whether several processes may write ``path`` at once. A process that is killed then leaves a file that
            no later call overwrites.
    """
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}" if shared else f".{path.name}")
    try:
        yield partial
        if fsync:
            _fsync(partial, os.O_RDONLY)
        partial.replace(path)
        if fsync:
            sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            error.filename = str(path)  # the user does not know the other name
        raise


def atomic_write_text(path: Path, text: str, fsync: bool = False, shared: bool = False) -> None:
    """Write ``text`` to ``path`` as UTF-8. The arguments are those of ``atomic_path``."""
    with atomic_path(path, fsync, shared) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(place: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``place`` if the block succeeds, and is removed otherwise.

    Args:
        place: The final directory. Missing parents are created.

    Raises:
        UserError: If the temporary directory cannot be created.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise UserError(
            f"{place} cannot be made ({error.strerror}: {error.filename}); set IMAGENET_FAST_CACHE, or the --out of "
            "`data fetch`, to a directory that you may write to"
        ) from None
    try:
        yield partial
        partial.chmod(0o755)
        try:
            partial.rename(place)
        except OSError:
            if not place.is_dir():  # else another process has created it first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_place(path: Path, descriptor: int) -> None:
    """Raise FileNotFoundError if what is open as ``descriptor`` is no longer at ``path``: it was renamed or removed.

    Its name is compared, as inode numbers may change: file systems in user space forget them.
    """
    if path.resolve() != Path(f"/proc/self/fd/{descriptor}").readlink():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def sync_folder(folder: Path) -> None:
    """Sync the names in ``folder`` to disk, so that they survive a power failure, where the file system can.

    Raises:
        OSError: The directory cannot be synced; the error names it.
    """
    try:
        _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(folder)
            raise


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON with null for NaN and infinities, which RFC 8259 lacks.

    Dataclasses and NumPy's numbers may be in it.
    """

    def plain(other: Any) -> Any:
        return asdict(other) if is_dataclass(other) and not isinstance(other, type) else other.item()

    text = json.dumps(value, default=plain)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent)
