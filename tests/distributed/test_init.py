"""What a rank computes on, which connections its backends open, and what becomes of its memory."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.distributed import groups
from imagenet_fast.distributed.init import prepare_device
from tests.conftest import refusal_of
from tests.pages import ROOT
from tests.ranks import with_ranks


@contextmanager
def one_gpu() -> Iterator[None]:
    """As torch would see one."""
    with pytest.MonkeyPatch.context() as given, patch.dict(os.environ):
        given.setattr(torch.cuda, "is_available", lambda: True)
        given.setattr(torch.cuda, "device_count", lambda: 1)
        given.setattr(torch.cuda, "set_device", lambda device: None)
        given.setattr(torch.backends.cudnn, "benchmark", False)
        yield


@with_ranks(4, fresh=True)
def test_gloo_beside_nccl_connects_only_to_ranks_it_is_asked_to_reach():
    """Else each rank of 512 would hold 512 sockets a group, for messages that nobody sends."""
    assert prepare_device(0)[1] == "gloo"
    before = _sockets()
    dist.new_group(backend="gloo")
    alone = _sockets()
    with one_gpu():
        assert "gloo" in prepare_device(0)[1]
        dist.new_group(backend="gloo")
    assert (alone - before, _sockets() - alone) == (4, 1), "without GPUs, and beside NCCL"


def _sockets() -> int:
    """Those that this process has open."""
    held = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            held += file.readlink().name.startswith("socket:")
        except OSError:  # the listing's own
            continue
    return held


@pytest.mark.ci
@pytest.mark.usefixtures("subprocesses")
def test_nccl_launch_order_is_implicit_for_loops_of_users_too():
    """They make the process group themselves; NCCL reads the variable with the first collective."""
    clean = {key: value for key, value in os.environ.items() if key != "NCCL_LAUNCH_ORDER_IMPLICIT"}
    command = [sys.executable, "-c", "import os, imagenet_fast.sync; print(os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'])"]
    assert subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout == "1\n"


@with_ranks(2)
def test_who_has_used_nccl_before_our_import_is_warned() -> None:
    dist.barrier()
    for backends, warned in (("cpu:gloo,cuda:gloo", 0), ("cpu:gloo,cuda:nccl", 1)):
        with patch.dict(os.environ), warnings.catch_warnings(record=True) as told:
            del os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
            with patch.object(dist, "get_backend_config", return_value=backends):
                groups._order_kernels()
            assert len(told) == warned


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prepare_device(0)[0].type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert refusal_of(prepare_device, 0) == (
        "this node has 8 GPUs that torch cannot use; `imagenet-fast doctor` says why, and CUDA_VISIBLE_DEVICES= in the "
        "environment trains on the CPU"
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize("setting", [{}, {"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}])
@with_ranks(1, fresh=True)
def test_freed_tensors_are_kept_for_the_next_unless_the_environment_says_otherwise(setting: dict[str, str]):
    """Else the kernel clears each page of a large tensor again at every step."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        del os.environ[name]
    os.environ |= setting
    prepare_device(0)
    before = _resident()
    for _ in range(3):
        torch.ones(48 << 20, dtype=torch.uint8)
    assert (_resident() - before > 40 << 20) == (not setting)


def _resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
