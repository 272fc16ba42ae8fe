"""Replace files of a run atomically, so that a reader never sees half of one."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically.

    The temporary file has a name unique to this call, since nodes may share the directory.
    """
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
