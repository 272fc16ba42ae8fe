"""Trees as training states are, and worse; and whether two are the same to the last bit."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_fast.checkpoint import Checkpoint, CheckpointWriter, Stamp, newest
from imagenet_fast.checkpoint.tree import _CODES
from imagenet_fast.distributed.ranks import RankInfo

ALONE = RankInfo(0, 1, 0, 1)
DTYPES = (*(dtype for dtype in _CODES if dtype != torch.bool), torch.complex64, torch.uint16, torch.float8_e5m2fnuz)


def stamp(step: int, world: int = 1, top1: float | None = None) -> Stamp:
    return Stamp(step=step, epoch=1 + step // 100, world=world, layout={"data": world}, top1=top1)


def state(step: int, rank: int = 0, values: int = 300) -> dict[str, Any]:
    """What differs in every bit from that of another step or rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weight = torch.randn(values, generator=generator)
    return {"step": step, "rank": rank, "weight": weight, "loss": float(weight[0]), "random": generator.get_state()}


def saved(root: Path, *steps: int, keep: int = 9, **stamped: Any) -> None:
    """Checkpoints of these steps by one rank, which has some of its own."""
    root.mkdir(exist_ok=True)
    with CheckpointWriter(root, ALONE, keep=keep) as writer:
        for step in steps:
            writer.save(stamp(step, **stamped), state(step), state(step, rank=1))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def found_step(root: Path) -> int:
    """Of the newest, which is as it was saved."""
    found = newest(root)
    assert is_that_of(found, found.manifest.step)
    return found.manifest.step


def is_that_of(checkpoint: Checkpoint, step: int) -> bool:
    whole = same(checkpoint.shared, state(step)) and same(checkpoint.part(0), state(step, rank=1))
    return whole and checkpoint.manifest.step == step


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            alike = all(getattr(one, what) == getattr(other, what) for what in ("dtype", "shape", "device"))
            return alike and one.stride() == other.stride() and torch.equal(bits(one), bits(other))
        case dict():
            return [*one] == [*other] and all(same(a, b) for a, b in zip(one.values(), other.values(), strict=True))
        case list() | tuple():
            return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
        case float():
            return struct.pack("d", one) == struct.pack("d", other)
        case _:
            return one == other


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def hostile() -> dict[Any, Any]:
    """All that a tree may hold."""
    convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    tied = torch.randn(4, 3)
    noise = torch.arange(64, dtype=torch.uint8)
    return {
        "plain": [None, True, False, 0, -1, 2**53 + 1, -(2**200), "", "ünï\udc80\0\"\\/"],
        "floats": [0.0, -0.0, 1.0, 1e22, 5e-324, 0.1, float("inf"), -float("inf"), float("nan")],
        "nested": {"empty": [{}, [], (), {"": {"": []}}], "tuple": (1, (2.0, [torch.ones(())]), ())},
        "keys": {1: "int", "1": "str", None: 0, False: 0, 2.5: 0, (1, "a"): 0, "$tensor": "not one"},
        "$tuple": "a name of ours",
        "a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.full((1,), 2.0), "": torch.zeros(2),
        chr(0xDCFF): torch.full((1,), 3.0), chr(0xDCFE): torch.full((1,), 4.0),
        "dtypes": {str(dtype): noise.view(dtype) for dtype in DTYPES},
        "bool": torch.tensor([True, False, True]),
        "shapes": [torch.tensor(7), torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, 4), torch.zeros((1,) * 12)],
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "parameters": convolution.state_dict(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels last 3d": torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        "one by one": torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 7).t(),
        "permuted": torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "generators": [torch.get_rng_state(), np.random.PCG64(3).state, random.Random(7).getstate()],
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "tied": [tied, tied, tied.detach(), tied.view(3, 4), tied.t(), tied[1:]],
    }  # fmt: skip
