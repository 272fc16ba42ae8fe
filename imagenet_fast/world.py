"""The ranks: who we are, joining and leaving the process group, and what they agree on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from imagenet_fast.errors import UserError
from imagenet_fast.launch import TORCHRUN
from imagenet_fast.sync.lane import PeerLost

_ROLL_CALL_S = 0.5  # between two looks whether somebody calls the roll


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes the record."""
        return self.rank == 0


@contextmanager
def join(timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """Join the process group torchrun's environment describes: NCCL where there are GPUs, else gloo.

    Raises UserError where the rendezvous port is taken.
    """
    rank, size, local_rank, local_size = (int(os.environ[key]) for key in TORCHRUN)
    device, backend = prepare_device(local_rank)
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    except dist.DistNetworkError as error:
        raise UserError(
            f"rank {rank} cannot use {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} ({error}); "
            "is the port in use? choose another with --rdzv-endpoint HOST:PORT"
        ) from None
    with answering_roll_calls():
        yield World(rank, size, local_rank, local_size, device)
    dist.destroy_process_group()  # not after an error: it would wait for collectives that never end


def prepare_device(local_rank: int) -> tuple[torch.device, str]:
    """This rank's GPU, set up for speed, and the backends for it; the CPU and gloo where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    return device, "cpu:gloo,cuda:nccl"


def same_everywhere(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # not a set, whose order differs between ranks
        alike = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        dist.broadcast(flat, src=0)
        _scatter(flat, alike)


def average_batch_norms(model: nn.Module) -> None:
    """Replace the running statistics of every rank by their mean over ranks.

    Each rank normalises by the images it saw, so the running means and variances drift apart; an evaluation
    or a save must come from one model.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    running = [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]
    if running:
        flat = torch.cat(running)
        dist.all_reduce(flat)
        _scatter(flat.div_(dist.get_world_size()), running)


@contextmanager
def answering_roll_calls() -> Iterator[None]:
    """Have a thread answer when another rank asks who is left; this one may be stuck in a collective.

    The thread ends with the block: one that comes back from the store while Python ends would abort the process.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    leaving = threading.Event()

    def listen() -> None:
        with suppress(dist.DistError):
            while not leaving.wait(_ROLL_CALL_S):
                if store.check(["roll-call"]):
                    store.set(f"here/{rank}", "")
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join(2 * _ROLL_CALL_S)  # no longer: the store may be gone, and slow to say so


def report_failure(error: Exception) -> str:
    """Why this rank ends, in a sentence, left for the other ranks in the store they met at; the first one stays.

    Where the error is a broken connection, the sentence names the ranks that were lost.
    """
    rank = dist.get_rank()
    message = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if _is_broken_connection(error):
            lost = _lost_ranks(store, rank, dist.get_world_size())
            if lost:
                message = f"rank {', '.join(map(str, lost))} ended or stopped answering; its own output says why"
        store.compare_set("failure", "", message)
    return message


def reported_failure() -> str:
    """What :func:`report_failure` left, or nothing."""
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if store.check(["failure"]):
            return store.get("failure").decode()
    return ""


def total(*values: float, device: torch.device) -> list[float]:
    """The sum of each value over all ranks, added in float64."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return [float(value) for value in sums]


def _is_broken_connection(error: Exception) -> bool:
    """Whether a backend, or a collective of ours, could not reach another rank."""
    backend = any(name in str(error) for name in ("gloo", "Gloo", "NCCL", "Connection"))
    return isinstance(error, PeerLost | dist.DistError) or (isinstance(error, RuntimeError) and backend)


def _lost_ranks(store: Store, rank: int, size: int) -> list[int]:
    """The ranks that do not answer a roll call. Which connection broke first says little: giving up breaks more."""
    store.set("roll-call", "")
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + 4 * _ROLL_CALL_S
    while True:
        lost = [other for other in range(size) if not store.check([f"here/{other}"])]
        if not lost or time.monotonic() > deadline:
            return lost
        time.sleep(0.05)


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
