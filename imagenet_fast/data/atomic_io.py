"""A folder or a file that is there whole or not at all."""

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
    """A folder to fill that becomes ``place`` only when the block ends well; otherwise nothing is left behind.

    Raises UserError where there can be none.
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
            if not place.is_dir():  # otherwise another process was quicker
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``path`` anew: there is what was before, or all of the new, also after the power has failed."""
    partial = path.with_name(f".{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
