"""Whether a node has what ``torch.compile`` needs; torch says so in pages, when the first block runs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch

from imagenet_fast.errors import UserError

_OTHERWISE = "or set compile to false"


@cache
def check_compiler() -> None:
    """Compile an empty library as torch's Inductor or Triton does, where they do it, and load it.

    Raises:
        UserError: There is no compiler, it does not find Python's headers, or the directory is mounted noexec or cannot
            be written.
    """
    known = [os.environ.get("CC"), "gcc", "clang"] if torch.cuda.is_available() else [os.environ.get("CXX", "g++")]
    names = [name for name in known if name]
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise UserError(f"compile true needs a compiler, and there is no {names[0]} here; install one, {_OTHERWISE}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            source, library = Path(place, "empty.c"), Path(place, "empty.so")
            source.write_text("#include <Python.h>\n", encoding="utf-8")
            headers = f"-I{sysconfig.get_path('include', 'posix_prefix')}"  # Debian's own scheme has none there
            words = [program, headers, "-shared", "-fPIC", str(source), "-o", str(library)]
            done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
            if done.returncode == 0:
                ctypes.CDLL(str(library))
    except OSError as error:
        raise UserError(
            f"compile true cannot load what it makes in {folder} ({error.strerror or error}); set "
            f"TORCHINDUCTOR_CACHE_DIR to a directory that can be written and is not mounted noexec, {_OTHERWISE}"
        ) from None
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
        raise UserError(
            f"compile true needs a compiler with Python's headers, and {program} fails ({reason}); install python3-dev "
            f"or what else it names, {_OTHERWISE}"
        )
