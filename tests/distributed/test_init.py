"""What a rank computes on, and which connections its backends open."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.errors import UserError
from tests.pages import ROOT
from tests.ranks import run


@contextmanager
def one_gpu() -> Iterator[pytest.MonkeyPatch]:
    """As torch would see one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.backends.cudnn, "benchmark", False)
        yield patch


def test_gloo_beside_nccl_connects_only_to_ranks_it_is_asked_to_reach():
    """Else each rank of 512 would hold 512 sockets a group, for messages that nobody sends."""
    assert run(4, _sockets_of_a_group) == [(4, 1)] * 4


def _sockets_of_a_group() -> tuple[int, int]:
    """Without GPUs, and beside NCCL."""
    assert prepare_device(0)[1] == "gloo"
    before = _sockets()
    dist.new_group(backend="gloo")
    alone = _sockets()
    with one_gpu():
        assert "gloo" in prepare_device(0)[1]
        dist.new_group(backend="gloo")
    return alone - before, _sockets() - alone


def _sockets() -> int:
    """Those that this process has open."""
    held = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            held += file.readlink().name.startswith("socket:")
        except OSError:  # the listing's own
            continue
    return held


def test_whoever_has_set_how_gloo_connects_keeps_it():
    with one_gpu() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", "0")
        prepare_device(0)
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"


def test_whoever_has_set_the_drivers_queues_keeps_them():
    with one_gpu() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        prepare_device(0)
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize("set_by_user", [None, "0"])
def test_nccl_launch_order_is_implicit_for_loops_of_users_too(set_by_user: str | None):
    """They make the process group themselves; NCCL reads the variable with the first collective."""
    code = "import os, imagenet_fast.sync; print(os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'])"
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_LAUNCH_ORDER_IMPLICIT"}
    environment |= {"NCCL_LAUNCH_ORDER_IMPLICIT": set_by_user} if set_by_user else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (set_by_user or "1")


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nMore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert prepare_device(0)[0].type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UserError) as told:
        prepare_device(0)
    assert str(told.value) == (
        "this node has 8 GPUs that torch cannot use (The NVIDIA driver on your system is too old (found version 11040))"
        "; `imagenet-fast doctor` says what to do, and CUDA_VISIBLE_DEVICES= in the environment trains on the CPU"
    )


FREED = """
import resource, torch
from pathlib import Path
from imagenet_fast.distributed.init import prepare_device

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

prepare_device(0)
before = resident()
for _ in range(3):
    torch.ones(48 << 20, dtype=torch.uint8)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize("setting", [{}, {"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}])
def test_freed_tensors_are_kept_for_the_next_unless_the_environment_says_otherwise(setting: dict[str, str]):
    """Else the kernel clears each page of a large tensor again at every step."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FREED], env={**ours, **setting, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(done.stdout) > 40 << 20) == (not setting)
