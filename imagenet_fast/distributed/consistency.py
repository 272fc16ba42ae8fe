"""Checks that all ranks have the same model and the same engine, made when a pool is created.

With other weights, another order of layers or another engine on one rank, training would silently diverge, fail with a
backend error or hang. So the ranks exchange digests, and details only where these differ. Every rank then raises the
same ValueError. It names the first rank, and the first parameter or setting, that differs from the first rank's.
Every bit of the weights counts; to hash AlexNet's 61 million takes a quarter of a second, once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from imagenet_fast.distributed.reductions import first_difference, is_plain


class _Param(NamedTuple):
    """What must be the same of a parameter on every rank."""

    number: int
    name: str
    traits: tuple[str, ...]
    """Shape, dtype and the like, in words that follow "is"."""
    digest: str


def compare_models(named: Mapping[str, nn.Parameter], model: nn.Module | None, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks of ``group`` have the same parameters. All of them must call it.

    Warn if they have different buffers, which nothing makes equal later. Statistics of norms may differ.

    Args:
        named: The parameters by name. Order, shape, dtype, device type, strides, ``requires_grad`` and values count.
        model: The model whose buffers are compared; None: there are none.
        group: The ranks to compare; None: all.

    Raises:
        ValueError: The parameters of one rank differ from those of the first.
    """
    if _is_alone(group):
        return
    params = [
        _Param(number, name, _traits(param), _digest(param))
        for number, (name, param) in enumerate(named.items(), start=1)
    ]
    device = next(iter(named.values()), torch.empty(0)).device
    if said := first_difference(params, _model_difference, device, group):
        raise ValueError(said)
    if model is not None:
        digested = [(name, _digest(buffer)) for name, buffer in _other_buffers(model)]
        if said := first_difference(digested, _buffer_difference, device, group):
            warnings.warn(said, stacklevel=4)
    if (unmade := next((name for name, param in named.items() if param.is_meta), None)) is not None:
        raise ValueError(
            f"{unmade} is on the meta device; call the model's to_empty() and load its weights before the pool is made"
        )


def compare_engines(
    settings: object, steps_per_epoch: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Check that all ranks of ``group`` use the same engine and settings. All of them must call it.

    Args:
        settings: A ``[sync]`` table, or the dataclass of an engine.
        steps_per_epoch: Compared as well.
        group: The ranks to compare; None: all.
        device: Where the model is.

    Raises:
        ValueError: The engine or a setting of one rank differs from that of the first.
    """
    if _is_alone(group):
        return
    knobs = dict(settings) if isinstance(settings, BaseModel) else {"kind": type(settings).__name__} | vars(settings)
    told = [(name, _text(value)) for name, value in knobs.items()]
    if said := first_difference([*told, ("steps_per_epoch", str(steps_per_epoch))], _engine_difference, device, group):
        raise ValueError(said)


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    """Return whether there is no other rank to compare with; the ``fake`` backend sends nothing."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return True
    return "fake" in str(dist.get_backend(group))


def _model_difference(ours: _Param | None, theirs: _Param | None, rank: int, first: int) -> str:
    if ours is None or theirs is None or theirs.name != ours.name:
        number = max(one.number for one in (ours, theirs) if one is not None)
        names = ["nothing" if one is None else one.name for one in (ours, theirs)]
        return (
            f"ranks train different models: parameter {number} is {names[0]} on rank {rank} and {names[1]} on rank "
            f"{first}; build the same model, with its layers in the same order, on every rank"
        )
    for one, other in zip(ours.traits, theirs.traits, strict=True):
        if one != other:
            remedy = "set requires_grad alike" if one in ("trained", "frozen") else "build the same model"
            return (
                f"ranks train different models: {ours.name} is {one} on rank {rank} and {other} on rank {first}; "
                f"{remedy} on every rank, before the pool is made"
            )
    return (
        f"ranks begin with different weights: {ours.name} has other values on rank {rank} than on rank {first}; give "
        "all ranks the same before the pool is made: by torch.manual_seed before the model is built, from one file, "
        "or by torch.distributed.broadcast of every parameter"
    )


def _other_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.named_buffers(path, recurse=False)


def _buffer_difference(ours: tuple[str, str] | None, theirs: tuple[str, str] | None, rank: int, first: int) -> str:
    name = (ours or theirs or ("", ""))[0]
    return (
        f"buffer {name} has other values on rank {rank} than on rank {first}, and will keep them, so ranks train "
        "different models; call imagenet_fast.distributed.reductions.broadcast_model before the pool is made"
    )


def _engine_difference(ours: tuple[str, str] | None, theirs: tuple[str, str] | None, rank: int, first: int) -> str:
    name = (ours or theirs or ("", ""))[0]
    values = ["not there" if one is None else one[1] for one in (ours, theirs)]
    return (
        f"ranks attach different engines: {name} is {values[0]} on rank {rank} and {values[1]} on rank {first}; give "
        "every rank the same settings"
    )


def _traits(param: nn.Parameter) -> tuple[str, ...]:
    strides = tuple(step for size, step in zip(param.shape, param.stride(), strict=True) if size > 1)
    return (
        f"of shape {tuple(param.shape)}", f"of dtype {param.dtype}", f"on {param.device.type}",
        f"in memory with strides {strides}", "trained" if param.requires_grad else "frozen",
    )  # fmt: skip


def _text(value: object) -> str:
    """Return a text that is the same on every rank: without memory addresses."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, str | int | float | tuple | list | torch.dtype | None):
        return str(value)
    return f"{type(value).__qualname__}({', '.join(f'{k}={_text(v)}' for k, v in vars(value).items())})"


def _digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's bytes in logical order; empty if they are unknown."""
    if tensor.is_meta or not is_plain(tensor):
        return ""
    octets = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(octets.numpy().data, digest_size=8).hexdigest()
