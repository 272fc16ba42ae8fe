"""Create a directory or a file atomically: it is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imagenet_fast.errors import UserError


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


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically: the file holds all of the old or all of the new text.

    This holds after a power failure too.
    """
    partial = path.with_name(f".{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
