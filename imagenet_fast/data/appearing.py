"""A folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing_whole(place: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``place`` only when the block ends well; otherwise nothing is left behind."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
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
