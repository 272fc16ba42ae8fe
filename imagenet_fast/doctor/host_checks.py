"""Checks of one node by itself: its software, its limits, its disks, the data set."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from imagenet_fast.data.dali import is_installed
from imagenet_fast.data.source import check_folders, open_training, open_validation
from imagenet_fast.data.throughput import OwnLoader, measure, training_batches
from imagenet_fast.distributed.cores import usable_cores, usable_memory
from imagenet_fast.doctor.report import CheckResult, check, refused
from imagenet_fast.errors import UserError
from imagenet_fast.models.compiler import check_compiler
from imagenet_fast.plan.devices import device_of
from imagenet_fast.run.run_dir import RunDir, new_folder

_OLDEST_TORCH = (2, 11)
_GIB = 2**30
_MEMORY, _SHARED, _FREE, _FILES = 2 * _GIB, _GIB, 5 * _GIB, 4096
_BATCH, _SECONDS = 128, 2.0


def examine(data: Path | None, out: Path, ranks: int) -> list[CheckResult]:
    """Return the results of all checks that need no other ranks.

    Args:
        data: The data directory; None if there is none to check.
        out: The directory where runs would be stored.
        ranks: Number of ranks on this node.
    """
    return [
        *_software(), *_graphics(), _dali(), _compiler(), *_processors(ranks),
        *_limits(), _disk(out), *(() if data is None else _images(data, ranks)),
    ]  # fmt: skip


def _software() -> Iterator[CheckResult]:
    yield CheckResult("python", "ok", platform.python_version())  # with an older one nothing of ours is installed
    good = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= _OLDEST_TORCH
    fix = "`pip install -U torch torchvision`, to 2.11 or later"
    yield check("torch", good, torch.__version__, fix, "fail")


def _dali() -> CheckResult:
    install, without = "`pip install nvidia-dali-cuda130` (Linux)", "train with --set data.loader=threads"
    try:
        dali = version("nvidia-dali-cuda130")
        import nvidia.dali  # noqa: F401  (what is installed may not load)
    except PackageNotFoundError:
        return CheckResult("DALI", "warn", "is not installed", f"{install}, or {without}")
    except (ImportError, OSError) as error:
        return CheckResult("DALI", "fail", f"does not load ({error})", f"install it anew, or {without}")
    return CheckResult("DALI", "ok", dali)


def _compiler() -> CheckResult:
    try:
        check_compiler()
    except UserError as error:
        return refused("compiler", error, "warn")
    return CheckResult("compiler", "ok", "torch.compile finds what it needs")


def _graphics(root: Path = Path("/")) -> Iterator[CheckResult]:
    """Check the GPUs, and whether torch, which counts them by NVML and starts them by CUDA, works with the driver."""
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    driver = (root / "dev/nvidiactl").exists()  # else the kernel's driver serves others, as in a container without GPUs
    version_file = root / "sys/module/nvidia/version"
    named = f"driver {version_file.read_text().strip() if version_file.is_file() else 'unknown'}"
    if available and count:
        for number in range(count):
            yield _card(number, named)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield CheckResult("GPU", "ok", "hidden by CUDA_VISIBLE_DEVICES; ranks train on the CPU")
    elif driver and torch.version.cuda is None:
        fix = "`pip install torch torchvision` without an index of CPU builds"
        yield CheckResult("GPU", "fail", f"there is one ({named}), but this torch is a CPU build", fix)
    elif driver or count:
        fix = (
            "update the driver and restart the node, or look at CUDA_VISIBLE_DEVICES; with NVSwitch, see that "
            "nvidia-fabricmanager runs"
        )
        there = f"the driver counts {count} GPUs, but " if count else ""
        yield CheckResult("GPU", "fail", f"{there}{named} does not serve this torch's CUDA {torch.version.cuda}", fix)
    else:
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
    cores, memory, shared = usable_cores(), usable_memory(), Path("/dev/shm")
    fix = f"start at most {cores} with --nproc, or allow this process more"
    yield check("cores", ranks <= cores, f"{cores} for {ranks} rank{'s' if ranks > 1 else ''}", fix)
    fix = "end other programs, or train with a smaller micro_batch"
    yield check("memory", memory >= _MEMORY, f"{memory / _GIB:.1f} GiB available", fix)
    if shared.is_dir():  # NCCL's buffers between the GPUs of a node lie there; Docker gives 64 MiB
        free = shutil.disk_usage(shared).free
        fix = "give the container more: --ipc=host, or --shm-size=8g"
        yield check("/dev/shm", free >= _SHARED, f"{free / _GIB:.1f} GiB free", fix)


def _limits() -> Iterator[CheckResult]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # ranks, and who holds their store, raise their own to it
    fix = "raise the hard limit, as by `ulimit -Hn 65536` as root (in a container --ulimit nofile=65536)"
    yield check("open files", most >= _FILES, f"at most {most}", fix)
    if any(Path("/sys/class/infiniband").glob("*")):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        free = locked == resource.RLIM_INFINITY
        said = "unlimited" if free else f"at most {locked // 1024} KiB, with InfiniBand here"
        fix = "`ulimit -l unlimited` (in a container --ulimit memlock=-1), or NCCL cannot use RDMA"
        yield check("locked memory", free, said, fix)


def _disk(out: Path) -> CheckResult:
    try:
        RunDir(out / new_folder("doctor", "run").name).check_writable()
    except UserError as error:
        return refused("runs", error)
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    # A checkpoint of AlexNet is 490 MB, and two or three are kept.
    return check("runs", free >= _FREE, f"{free / _GIB:.0f} GiB free under {place}", "make room, or give another --out")


def _images(data: Path, ranks: int) -> Iterator[CheckResult]:
    """Check that there are images to train on, and how fast. This lists all images, and the lists are kept."""
    try:
        check_folders(data)
        val = open_validation(data)
    except (UserError, OSError) as error:
        yield CheckResult("data", "fail", str(error))
        return
    shown = set(val.labels.tolist())
    said = f"{data} has images of the same classes to train on and to validate"
    if missing := [name for label, name in enumerate(val.classes) if label not in shown]:
        many = f"{len(missing)} of the {len(val.classes)} classes, the first {missing[0]!r}"
        said = f"in {data} val has no images of {many}"
    yield check("data", not missing, said, "copy them, too, or top-1 says nothing about these classes")
    try:
        yield _speed(data, max(1, usable_cores() // ranks))
    except UserError as error:
        yield refused("images", error)


def _speed(data: Path, threads: int) -> CheckResult:
    """Time what one rank's loader gives alone, beside what its GPU takes."""
    images, on_gpu = open_training(data), torch.cuda.is_available()
    batch, device = min(_BATCH, len(images)), torch.device("cuda:0" if on_gpu else "cpu")
    loader: OwnLoader = "dali" if on_gpu and is_installed() else "threads"
    rate, _ = measure(training_batches(loader, images, 224, batch, threads, device), batch, _SECONDS, device, 0)
    said = f"a rank is given {rate:,.0f} images/s of 224 pixels by {threads} thread{'s' * (threads > 1)}"
    card = device_of(torch.cuda.get_device_name()) if on_gpu else None
    if card is None:
        return CheckResult("images", "ok", said)
    trained = _BATCH / card.compute("resnet50").seconds(_BATCH)
    fix = "store them decoded, by `data prepare --format pixels --resize 256`, or shrink them"
    return check("images", rate >= trained, f"{said}; its {card.name} trains ResNet-50 at {trained:,.0f}", fix)
