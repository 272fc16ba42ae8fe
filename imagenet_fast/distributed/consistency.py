"""Checks that all ranks have the same, made before it matters: model, engine and images.

With other weights, another order of layers or another engine on one rank, training would silently diverge, fail with a
backend error or hang. Every rank then raises the same error. It names the first rank, and the first parameter or
setting, that differs from the first rank's. Every bit of the weights counts; to hash AlexNet's 61 million takes a
quarter of a second, once.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.reductions import is_plain

_Own = TypeVar("_Own")


def first_difference(
    own: _Own, describe: Callable[[_Own], str], device: torch.device, group: dist.ProcessGroup | None = None
) -> str:
    """Compare what ranks have with the first rank's; return a sentence about the first that differs, or an empty one.

    All ranks of ``group`` must call it, and get the same sentence.

    Args:
        own: What this rank has.
        describe: Returns the sentence from what the first rank has. Called where that is not equal.
        device: Device of this rank.
        group: The ranks; None: all.
    """
    ranks = dist.get_process_group_ranks(group)
    theirs, sentences = [own], [""] * len(ranks)
    with here.waiting(), torch.cuda.device(device if device.type == "cuda" else -1):  # NCCL sends by the current device
        dist.broadcast_object_list(theirs, src=ranks[0], group=group)
        dist.all_gather_object(sentences, "" if theirs[0] == own else describe(theirs[0]), group=group)
    return next((sentence for sentence in sentences if sentence), "")


_DIFFERENT = {
    "engine": ("ranks attach different engines", "give every rank the same settings"),
    "model": (
        "ranks train different models",
        "build the same model, with its layers in the same order and requires_grad alike, on every rank, before the "
        "pool is made",
    ),
    "weights": (
        "ranks begin with different weights",
        "give all ranks the same before the pool is made: by torch.manual_seed before the model is built, from one "
        "file, or by torch.distributed.broadcast of every parameter",
    ),
    "buffers": (
        "buffers stay different, so ranks train different models",
        "call imagenet_fast.distributed.reductions.broadcast_model before the pool is made",
    ),
}
"""For each part that may differ: what is wrong, and what the user is to do."""


def compare_ranks(
    engine: object, steps_per_epoch: int, group: dist.ProcessGroup | None, named: Mapping[str, nn.Parameter],
    model: nn.Module | None = None, device: torch.device | None = None,
) -> None:  # fmt: skip
    """Check that all ranks of ``group`` use the same engine and have the same parameters. All of them must call it.

    Warn if they have different buffers, which nothing makes equal later. Statistics of norms may differ.

    Args:
        engine: A ``[sync]`` table, or the dataclass of an engine; None: engines are not compared.
        steps_per_epoch: Compared as a setting of the engine.
        group: The ranks to compare; None: all.
        named: The parameters by name. Order, shape, dtype, device type, strides, ``requires_grad`` and values count.
        model: The model whose buffers are compared; None: there are none.
        device: Device of this rank; None: that of the parameters.

    Raises:
        ValueError: The engine, a setting or a parameter of one rank differs from that of the first.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1 or "fake" in str(dist.get_backend(group)):
        return  # there is nobody to compare with; the ``fake`` backend sends nothing
    device = device or next(iter(named.values()), torch.empty(0)).device
    told = {
        "engine": _settings(engine, steps_per_epoch),
        "model": [*_traits(named)],
        "weights": [(name, f"of checksum {_digest(param)}") for name, param in named.items()],
    }
    if found := _first_of(told, device, group):
        raise ValueError(found)
    norms = nn.modules.batchnorm._NormBase  # whose statistics may differ
    others = [] if model is None else [m for m in model.named_modules() if not isinstance(m[1], norms)]
    buffers = [pair for path, module in others for pair in module.named_buffers(path, recurse=False)]
    checksums = [(name, f"of checksum {_digest(buffer)}") for name, buffer in buffers]
    if found := _first_of({"buffers": checksums}, device, group):
        warnings.warn(found, stacklevel=4)
    if (unmade := next((name for name, param in named.items() if param.is_meta), None)) is not None:
        raise ValueError(
            f"{unmade} is on the meta device; call the model's to_empty() and load its weights before the pool is made"
        )


def _first_of(told: Mapping[str, list[tuple[str, str]]], device: torch.device, group: dist.ProcessGroup | None) -> str:
    """Return a sentence about the first of the parts in ``told`` that is another on some rank, or an empty one."""
    first = dist.get_process_group_ranks(group)[0]

    def describe(theirs: Mapping[str, list[tuple[str, str]]]) -> str:
        kind = next(kind for kind in told if told[kind] != theirs[kind])
        ours, other = next(pair for pair in zip_longest(told[kind], theirs[kind]) if pair[0] != pair[1])
        texts = ["nothing" if one is None else one[1] for one in (ours, other)]
        difference = f"{(ours or other)[0]} is {texts[0]} on rank {dist.get_rank()} and {texts[1]} on rank {first}"
        return f"{_DIFFERENT[kind][0]}: {difference}; {_DIFFERENT[kind][1]}"

    return first_difference(told, describe, device, group)


def _settings(engine: object, steps_per_epoch: int) -> list[tuple[str, str]]:
    """Return the settings of an engine, if any, as texts that are the same on every rank: without memory addresses."""
    if engine is None:
        return []
    knobs = dict(engine) if isinstance(engine, BaseModel) else {"kind": type(engine).__name__} | vars(engine)
    knobs |= {"steps_per_epoch": steps_per_epoch}
    return [(name, re.sub(r" at 0x\w+", "", str(value))) for name, value in knobs.items()]


def _traits(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield what must be the same of parameters on every rank, but their values."""
    for number, (name, param) in enumerate(named.items(), 1):
        yield f"parameter {number}", name
        steps = param.stride() if param.layout is torch.strided else param.shape
        strides = tuple(step for size, step in zip(param.shape, steps, strict=True) if size > 1)
        yield name, f"of shape {tuple(param.shape)}"
        yield name, f"of dtype {param.dtype}"
        yield name, f"on {param.device.type}"
        yield name, f"in memory with strides {strides}"
        yield name, "trained" if param.requires_grad else "frozen"


def _digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's bytes in logical order; empty if they are unknown."""
    if tensor.is_meta or not is_plain(tensor):
        return ""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(octets.numpy().data, digest_size=8).hexdigest()
