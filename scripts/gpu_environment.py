"""Print the environment that `gpu-check.sh` runs in.

The exit code is 1 if a package that it needs is missing.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

NEEDED = (
    "numpy", "pillow", "psutil", "pydantic", "pytest", "rich", "safetensors", "tensorboard", "tomli-w",
    "torch", "torchvision", "typer",
)  # fmt: skip


def main() -> None:
    """Print the environment, and exit with 1 if a package is missing."""
    missing = [package for package in NEEDED if version_of(package) is None]
    say("date", datetime.now().astimezone().isoformat(timespec="seconds"))
    say("commit", told("git", "log", "-1", "--format=%h %cs"))
    say("node", platform.platform())
    say("python", platform.python_version())
    for package in ("torch", "torchvision", "triton", "nvidia-dali-cuda130"):
        say(package, version_of(package) or "is not there")
    say("missing", ", ".join(missing) or "nothing")
    if "torch" not in missing:
        import torch

        gpu = torch.cuda.is_available()
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        say("CUDA", str(torch.version.cuda))
        say("cuDNN", str(torch.backends.cudnn.version()))
        say("NCCL", ".".join(map(str, nccl)) or "is not there")
        say("GPU", str(torch.cuda.get_device_properties(0)) if gpu else "is not there")
        fields = "driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        say("driver", told("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"))
    sys.exit(bool(missing))


def say(what: str, value: str) -> None:
    """Print one line of a name and its value."""
    print(f"{what:20} {value}")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def told(*command: str) -> str:
    """Return the output of a command in one line, or ``is not known`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "is not known"
    return "; ".join(done.stdout.splitlines())


if __name__ == "__main__":
    main()
