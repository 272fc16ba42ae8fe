"""Where a run goes: the name of its directory, and whether one may be written there; without torch."""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path

from imagenet_fast.errors import UserError


def new_folder(recipe: str, what: str) -> Path:
    """Return a new directory for a run without ``--out``, named after the time, the ``recipe`` and ``what``.

    No other start has its name, though it begins in the same second on another node: six digits are random.
    """
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{what}-{secrets.token_hex(3)}"


def check_writable(folder: Path, resume: bool = False, otherwise: str = "go on with it by --resume auto, ") -> None:
    """Raise UserError if ``folder`` cannot be written, or holds a run and ``resume`` is False.

    Args:
        folder: The run directory.
        resume: Whether the run in it is to go on.
        otherwise: Begins what the message says to do about a run that is there.
    """
    nearest, whole = folder, str(folder.absolute())
    try:
        whole.encode()
    except UnicodeEncodeError:  # TensorBoard cannot write there
        raise UserError(
            f"--out {whole.encode(errors='backslashreplace').decode()} is not UTF-8; give another --out"
        ) from None
    try:
        if not resume and holds_run(folder):
            raise UserError(f"{folder} already holds a run; {otherwise}give another --out, or remove it")
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not nearest.is_dir():
            raise UserError(f"the run cannot be written to {folder}: {nearest} is a file; give another --out")
        tempfile.TemporaryFile(dir=nearest).close()  # root passes permission checks, but cannot write everywhere
    except OSError as error:
        raise UserError(
            f"the run cannot be written to {folder} ({error.strerror}: {nearest}); give another --out"
        ) from None


def holds_run(folder: Path) -> bool:
    """Return whether ``folder`` has results of a run. Raises OSError."""
    weights = (folder / "checkpoints").glob("*")
    return any((folder / name).exists() for name in ("events.jsonl", "outcome.json")) or any(
        path.name == "final.safetensors" or path.name.startswith("step-") for path in weights
    )
