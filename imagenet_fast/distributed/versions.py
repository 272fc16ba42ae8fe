"""Which imagenet-fast and torch run here: ranks of different ones would silently train different models."""

from __future__ import annotations

import hashlib
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

import imagenet_fast

_PACKAGE = Path(imagenet_fast.__file__).parent


def software() -> str:
    """Return the versions of imagenet-fast and torch, in words, with a digest of the sources: a copy may be changed."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"imagenet-fast {imagenet_fast.__version__} (sources {digest.hexdigest()}) with torch {torch.__version__}"


def commit() -> str:
    """Return the commit of the checkout that runs, with ``-dirty`` if files of it were changed; empty without git."""
    if not (_PACKAGE.parent / ".git").exists():
        return ""
    git = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(git, cwd=_PACKAGE.parent, stderr=subprocess.DEVNULL, encoding="utf-8").strip()
    return ""
