"""Files of a run that are replaced in one move, so that a reader never sees half of one."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write ``path`` anew, by a name of this call's own: nodes may share its directory."""
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
