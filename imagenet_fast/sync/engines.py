"""Engines made of settings: the declarations of ``cost_model/declarations.py`` with a wire dtype of torch."""

from __future__ import annotations

from typing import assert_never

import torch

from imagenet_fast.cost_model.declarations import DeclaredSettings, declaration_of
from imagenet_fast.recipe.engine_table import CodingTable, Wire
from imagenet_fast.recipe.sync_config import DdpSync, PowerSgdSync
from imagenet_fast.sync.compressor import Compressor
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.powersgd import PowerSGD


def declare(settings: DeclaredSettings) -> Engine:
    """Return the ``Engine`` that the settings stand for.

    ``Scheduler`` does not run sparse engines and DDP: for these, return the approximation that the cost model uses.
    """
    bf16_steps = settings.bf16_steps if isinstance(settings, CodingTable) else 0
    ours = {"wire": wire_dtype(settings.wire), "bf16_steps": bf16_steps, "compressor": _compressor(settings)}
    return Engine(**{**vars(declaration_of(settings)), **ours})


def _compressor(settings: DeclaredSettings) -> Compressor | None:
    match settings:
        case PowerSgdSync():
            return PowerSGD(settings.rank)
        case DdpSync(powersgd_rank=rank) if rank:
            return PowerSGD(rank)
        case _:
            return None


def wire_dtype(wire: Wire) -> torch.dtype:
    """Return the torch dtype of a wire dtype's name."""
    match wire:
        case "fp32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case "int8":
            return torch.int8
        case "fp8":
            return torch.float8_e4m3fn
        case _:
            assert_never(wire)
