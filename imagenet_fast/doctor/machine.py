"""One machine, looked at by itself: its software, its limits, its disks, the data set."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from imagenet_fast.data.recognising import check_folders
from imagenet_fast.doctor.findings import Finding
from imagenet_fast.errors import UserError
from imagenet_fast.ranks.cores import usable_cores
from imagenet_fast.recipe.schema import Timeout

_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_GIB = 2**30
_SHARED, _FREE, _FILES = 2**30, 5 * _GIB, 4096


def examine(data: Path | None, out: Path, ranks: int, timeout: Timeout) -> list[Finding]:
    """All that can be told without other ranks, of which this machine has ``ranks``; runs would lie in ``out``."""
    return [
        *_software(), *_processors(ranks), *_memory(), *_limits(Path("/sys/class/infiniband")), _disk(out),
        *_pictures(data), *_time_limits(timeout, os.environ),
    ]  # fmt: skip


def _software() -> Iterator[Finding]:
    python = platform.python_version()
    if sys.version_info >= _OLDEST_PYTHON:
        yield Finding("python", "ok", python)
    else:
        yield Finding("python", "fail", python, "install Python 3.11 or later")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found >= _OLDEST_TORCH:
        yield Finding("torch", "ok", torch.__version__)
    else:
        yield Finding("torch", "fail", torch.__version__, "`pip install -U torch torchvision`, to 2.11 or later")
    yield from _graphics(_driver())
    try:
        dali = version("nvidia-dali-cuda130")
        import nvidia.dali  # noqa: F401  (what is installed may not load)

        yield Finding("DALI", "ok", dali)
    except PackageNotFoundError:
        fix = "`pip install nvidia-dali-cuda130` (Linux), or train with --set data.loader=folder"
        yield Finding("DALI", "warn", "is not installed", fix)
    except (ImportError, OSError) as error:
        yield Finding("DALI", "fail", f"does not load ({error})", "install it anew, or --set data.loader=folder")


def _driver() -> str | None:
    """Of NVIDIA, if there is one."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else None


def _graphics(driver: str | None) -> Iterator[Finding]:
    """GPUs, and whether torch and the driver go together."""
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            gib = card.total_memory / _GIB
            said = f"{card.name}, {gib:.0f} GiB; CUDA {torch.version.cuda}, driver {driver or 'unknown'}"
            yield Finding(f"GPU {number}", "ok", said)
    elif driver is not None and torch.version.cuda is None:
        fix = "`pip install torch torchvision` without an index of CPU builds"
        yield Finding("GPU", "fail", f"there is one (driver {driver}), but this torch is a CPU build", fix)
    elif driver is not None:
        fix = "update the driver, or look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "fail", f"driver {driver} does not serve this torch's CUDA {torch.version.cuda}", fix)
    else:
        yield Finding("GPU", "ok", "none; ranks train on the processor")


def _processors(ranks: int) -> Iterator[Finding]:
    cores = usable_cores()
    said = f"{cores} for {ranks} rank(s)"
    if ranks > cores:
        yield Finding("cores", "warn", said, f"start at most {cores} with --nproc, or allow this process more")
    else:
        yield Finding("cores", "ok", said)


def _memory() -> Iterator[Finding]:
    available = psutil.virtual_memory().available
    said = f"{available / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        yield Finding("memory", "warn", said, "end other programs, or train with a smaller micro_batch")
    else:
        yield Finding("memory", "ok", said)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        said = f"{free / _GIB:.1f} GiB free"
        if free < _SHARED:  # NCCL's buffers between the GPUs of a machine lie there; Docker gives 64 MiB
            fix = "give the container more: --ipc=host, or --shm-size=8g"
            yield Finding("/dev/shm", "warn", said, fix)
        else:
            yield Finding("/dev/shm", "ok", said)


def _limits(infiniband: Path) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES:
        fix = f"`ulimit -n {min(hard, 65536) if hard > soft else 65536}` before the command"
        yield Finding("open files", "warn", f"at most {soft}", fix)
    else:
        yield Finding("open files", "ok", f"at most {soft}")
    if infiniband.is_dir() and any(infiniband.iterdir()):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY:
            fix = "`ulimit -l unlimited` (in a container --ulimit memlock=-1), or NCCL cannot use RDMA"
            yield Finding("locked memory", "warn", f"at most {locked // 1024} KiB, with InfiniBand here", fix)
        else:
            yield Finding("locked memory", "ok", "unlimited")


def _disk(out: Path) -> Finding:
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    said = f"{free / _GIB:.0f} GiB free under {place}"
    if not os.access(place, os.W_OK):
        return Finding("runs", "fail", f"{place} cannot be written", "choose another --out")
    if free < _FREE:  # a checkpoint of AlexNet is 490 MB, and two or three are kept
        return Finding("runs", "warn", said, "make room, or choose another --out")
    return Finding("runs", "ok", said)


def _pictures(data: Path | None) -> Iterator[Finding]:
    if data is None:
        return
    try:
        check_folders(data)
    except UserError as error:
        yield Finding("data", "fail", str(error))
    except OSError as error:
        yield Finding("data", "fail", f"{data} cannot be read ({error.strerror}); check the path and its rights")
    else:
        yield Finding("data", "ok", f"{data} has pictures of the same classes to train on and to validate")


def _time_limits(timeout: Timeout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What would end a run before our own time-outs, which name who is lost, or would let it hang."""
    said = f"{timeout.first_step_s:g} s for the first step, {timeout.step_s:g} s for others"
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        fix = "unset it, or ranks hang where one is lost"
        yield Finding("time-outs", "warn", "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0", fix)
        return
    beat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480")
    if beat.isdecimal() and int(beat) < timeout.first_step_s:
        fix = "unset it, or NCCL's watchdog kills ranks that only compile, and names none"
        yield Finding("time-outs", "warn", f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is {beat}; ours are {said}", fix)
        return
    yield Finding("time-outs", "ok", said)
