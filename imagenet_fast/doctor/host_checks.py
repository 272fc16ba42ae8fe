"""Checks of one node by itself: its software, its limits, its disks, the data set."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from imagenet_fast.data.source import check_folders, open_validation
from imagenet_fast.distributed.cores import usable_cores, usable_memory
from imagenet_fast.doctor.report import CheckResult
from imagenet_fast.errors import UserError
from imagenet_fast.models.compiler import check_compiler
from imagenet_fast.recipe.schema import Timeout

_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_GIB = 2**30
_SHARED, _FREE, _FILES = 2**30, 5 * _GIB, 4096
_SMI_S = 30.0  # nvidia-smi takes up to 10 s with eight cards and no persistence daemon


def examine(data: Path | None, out: Path, ranks: int, timeout: Timeout) -> list[CheckResult]:
    """Return the results of all checks that need no other ranks.

    Args:
        data: The data directory; None if there is none to check.
        out: The directory where runs would be stored.
        ranks: Number of ranks on this node.
        timeout: The run's own time-outs.
    """
    return [
        *_software(), *_processors(ranks), *_memory(), *_limits(Path("/sys/class/infiniband")), _disk(out),
        *_images(data), *_time_limits(timeout, os.environ),
    ]  # fmt: skip


def _software() -> Iterator[CheckResult]:
    python = platform.python_version()
    if sys.version_info >= _OLDEST_PYTHON:
        yield CheckResult("python", "ok", python)
    else:
        yield CheckResult("python", "fail", python, "install Python 3.11 or later")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found >= _OLDEST_TORCH:
        yield CheckResult("torch", "ok", torch.__version__)
    else:
        yield CheckResult("torch", "fail", torch.__version__, "`pip install -U torch torchvision`, to 2.11 or later")
    yield from _graphics(_driver())
    try:
        dali = version("nvidia-dali-cuda130")
        import nvidia.dali  # noqa: F401  (what is installed may not load)

        yield CheckResult("DALI", "ok", dali)
    except PackageNotFoundError:
        fix = "`pip install nvidia-dali-cuda130` (Linux), or train with --set data.loader=folder"
        yield CheckResult("DALI", "warn", "is not installed", fix)
    except (ImportError, OSError) as error:
        yield CheckResult(
            "DALI", "fail", f"does not load ({error})", "install it anew, or train with --set data.loader=folder"
        )
    try:
        check_compiler()
        yield CheckResult("compiler", "ok", "torch.compile finds what it needs")
    except UserError as error:
        said, _, fix = str(error).partition("; ")
        yield CheckResult("compiler", "warn", said, fix)


class _Driver(NamedTuple):
    """The NVIDIA driver, as far as nvidia-smi reports it."""

    version: str | None = None
    """The driver's version; None if nvidia-smi does not report it, or is not installed."""
    trouble: str = ""
    """The problem with the installed nvidia-smi; empty if there is none."""


def _driver() -> _Driver:
    """Ask nvidia-smi for the driver. It may fail or hang if a driver is being replaced or a card has died."""
    program = shutil.which("nvidia-smi", os.F_OK)  # also finds a file that may not be executed
    if program is None:
        return _Driver()
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.Popen(
            asked, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return _Driver(trouble=f"{program} cannot be executed ({error.strerror})")
    try:
        told = process.communicate(timeout=_SMI_S)[0].decode("utf-8", "replace").strip()
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel cannot be killed
            process.wait(1)
        return _Driver(trouble=f"{program} does not answer within {_SMI_S:g} s")
    first = told.partition("\n")[0].strip()
    said = repr(first[:100]) if first else "it says nothing"
    if process.returncode < 0:
        return _Driver(trouble=f"{program} was killed by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        return _Driver(trouble=f"{program} ended with exit code {process.returncode} ({said})")
    if not re.fullmatch(r"\d+(\.\d+)+", first):
        return _Driver(trouble=f"{program} names no driver ({said})")
    return _Driver(first)


def _graphics(driver: _Driver) -> Iterator[CheckResult]:
    """Check the GPUs, and whether torch and the driver work together.

    torch counts GPUs by NVML but starts them by CUDA's runtime, and the two may disagree.
    """
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if driver.trouble:
        fix = "reinstall or update the driver; after an update, restart the node"
        yield CheckResult("nvidia-smi", "warn" if available else "fail", driver.trouble, fix)
    named = f"driver {driver.version or 'unknown'}"
    if available and count:
        for number in range(count):
            yield _card(number, named)
    elif available:
        fix = "look at CUDA_VISIBLE_DEVICES, or restart the node"
        yield CheckResult("GPU", "fail", f"CUDA starts, but torch finds no GPU ({named})", fix)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield CheckResult("GPU", "ok", "hidden by CUDA_VISIBLE_DEVICES; ranks train on the CPU")
    elif driver.version is not None and torch.version.cuda is None:
        fix = "`pip install torch torchvision` without an index of CPU builds"
        yield CheckResult("GPU", "fail", f"there is one ({named}), but this torch is a CPU build", fix)
    elif driver.version is not None or count:
        fix = "update the driver, or look at CUDA_VISIBLE_DEVICES; with NVSwitch, see that nvidia-fabricmanager runs"
        there = f"the driver counts {count} GPUs, but " if count else ""
        yield CheckResult("GPU", "fail", f"{there}{named} does not serve this torch's CUDA {torch.version.cuda}", fix)
    elif not driver.trouble:
        yield CheckResult("GPU", "ok", "none; ranks train on the CPU")


def _card(number: int, driver: str) -> CheckResult:
    try:
        card = torch.cuda.get_device_properties(number)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        fix = "look for it with nvidia-smi and dmesg, or leave it out by CUDA_VISIBLE_DEVICES"
        return CheckResult(f"GPU {number}", "fail", f"does not answer ({reason})", fix)
    said = f"{card.name}, {card.total_memory / _GIB:.0f} GiB; CUDA {torch.version.cuda}, {driver}"
    return CheckResult(f"GPU {number}", "ok", said)


def _processors(ranks: int) -> Iterator[CheckResult]:
    cores = usable_cores()
    said = f"{cores} for {ranks} ranks" if ranks > 1 else f"{cores} for 1 rank"
    if ranks > cores:
        yield CheckResult("cores", "warn", said, f"start at most {cores} with --nproc, or allow this process more")
    else:
        yield CheckResult("cores", "ok", said)


def _memory() -> Iterator[CheckResult]:
    available = usable_memory()
    said = f"{available / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        yield CheckResult("memory", "warn", said, "end other programs, or train with a smaller micro_batch")
    else:
        yield CheckResult("memory", "ok", said)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        said = f"{free / _GIB:.1f} GiB free"
        if free < _SHARED:  # NCCL's buffers between the GPUs of a node lie there; Docker gives 64 MiB
            fix = "give the container more: --ipc=host, or --shm-size=8g"
            yield CheckResult("/dev/shm", "warn", said, fix)
        else:
            yield CheckResult("/dev/shm", "ok", said)


def _limits(infiniband: Path) -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES:
        fix = f"`ulimit -n {min(hard, 65536) if hard > soft else 65536}` before the command"
        yield CheckResult("open files", "warn", f"at most {soft}", fix)
    else:
        yield CheckResult("open files", "ok", f"at most {soft}")
    if infiniband.is_dir() and any(infiniband.iterdir()):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY:
            fix = "`ulimit -l unlimited` (in a container --ulimit memlock=-1), or NCCL cannot use RDMA"
            yield CheckResult("locked memory", "warn", f"at most {locked // 1024} KiB, with InfiniBand here", fix)
        else:
            yield CheckResult("locked memory", "ok", "unlimited")


def _disk(out: Path) -> CheckResult:
    fix = "choose another --out"
    try:
        place = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.lexists(path))
        if not place.is_dir():
            return CheckResult("runs", "fail", f"{place} is no directory", fix)
        tempfile.TemporaryFile(dir=place).close()  # permissions let root write anywhere, but some places still refuse
        if not out.exists() and len(out.name) > os.pathconf(place, "PC_NAME_MAX"):
            return CheckResult("runs", "fail", f"the name of {out} is too long", fix)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return CheckResult("runs", "fail", f"{out} cannot be written ({error.strerror})", fix)
    said = f"{free / _GIB:.0f} GiB free under {place}"
    if free < _FREE:  # a checkpoint of AlexNet is 490 MB, and two or three are kept
        return CheckResult("runs", "warn", said, f"make room, or {fix}")
    return CheckResult("runs", "ok", said)


def _images(data: Path | None) -> Iterator[CheckResult]:
    """Check that there are images to train on. This lists all validation images, and the list is kept."""
    if data is None:
        return
    try:
        check_folders(data)
        val = open_validation(data)
    except UserError as error:
        yield CheckResult("data", "fail", str(error))
    except OSError as error:
        yield CheckResult("data", "fail", f"{data} cannot be read ({error.strerror}); check the path and its rights")
    else:
        shown = set(val.labels.tolist())
        if missing := [name for label, name in enumerate(val.classes) if label not in shown]:
            many = f"{len(missing)} of the {len(val.classes)} classes, the first {missing[0]!r}"
            fix = "copy them, too, or top-1 says nothing about these classes"
            yield CheckResult("data", "warn", f"in {data} val has no images of {many}", fix)
        else:
            yield CheckResult("data", "ok", f"{data} has images of the same classes to train on and to validate")


def _time_limits(timeout: Timeout, environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Warn of settings that end a run before our own time-outs, which name the lost rank, or that let it hang."""
    said = f"{timeout.first_step_s:g} s for the first step, {timeout.step_s:g} s for others"
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        fix = "unset it, or ranks hang where one is lost"
        yield CheckResult("time-outs", "warn", "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0", fix)
        return
    beat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480")
    if beat.isdecimal() and int(beat) < timeout.first_step_s:
        fix = "unset it, or NCCL's watchdog kills ranks that only compile, and names none"
        yield CheckResult("time-outs", "warn", f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is {beat}; ours are {said}", fix)
        return
    yield CheckResult("time-outs", "ok", said)
