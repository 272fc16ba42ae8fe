"""Make engines of settings, by the declarations of ``cost_model/declarations.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from imagenet_fast.cost_model.declarations import declare
from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.recipe.sync_config import AutoSync, EngineSettings, LazySync, PowerSgdSync, SparseSync, Sync
from imagenet_fast.recipe.sync_table import Codes, PoolTable
from imagenet_fast.sync.auto import Auto, Candidate
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.sparse import Sparse


def build_engine(engine: EngineSettings | Declaration, buffer: GradientBuffer, steps_per_epoch: int = 1) -> SyncEngine:
    """Build the engine that a recipe's ``[sync]`` table names, or a custom ``Declaration``.

    Every rank must call it with the same arguments, as ``GradientPool`` does. ``steps_per_epoch`` converts those
    settings that are given in epochs.
    """
    if isinstance(engine, PoolTable):
        buffer.topology.max_ctas = engine.max_ctas
    match engine:
        case Declaration():
            return Scheduler(engine, buffer)
        case SparseSync():
            return Sparse(engine, buffer, steps_per_epoch)
        case PowerSgdSync():
            dense_steps = round((engine.dense_epochs or 0.0) * steps_per_epoch)
            return Scheduler(replace(declare(engine), plain_steps=dense_steps), buffer)
        case AutoSync():
            mb = 16.0 if buffer.values.is_cuda else 1.0
            meanwhile = LazySync(wire=engine.wire, threshold_mb=mb)
            return Auto(buffer, declare(meanwhile), _candidates(engine, buffer.topology.device), steps_per_epoch)
        case _:
            return Scheduler(declare(engine), buffer)


def _candidates(chooser: AutoSync, device: torch.device) -> list[Candidate]:
    """Return every engine with its default settings, and with 8-bit codes where ``auto`` may be inexact, to predict.

    Only this package's engines may be chosen, and inexact ones only where ``chooser`` allows them. Engines that defer
    are left out where ``chooser`` does not allow them. On GPUs with a 16-bit wire dtype there is also ``lazy`` with the
    backend's own all-reduce, which knows how the GPUs are wired. Its sums are made in the wire dtype.
    """
    candidates = []
    if device.type == "cuda" and chooser.wire in ("bf16", "fp16"):
        native = LazySync(wire=chooser.wire, collective="native")
        candidates.append(Candidate("lazy native", native, electable=True))
    wires = dict.fromkeys([chooser.wire, *(get_args(Codes) if chooser.inexact else ())])
    for table in get_args(get_args(Sync)[0]):
        allowed = () if table.chooses else get_args(table.model_fields["wire"].annotation)
        for wire in [wire for wire in wires if wire in allowed]:
            settings = table.model_validate({"wire": wire}).derived(dense_epochs=chooser.dense_epochs or 0.0)
            if settings.defers and not chooser.defers:
                continue
            name = settings.kind if wire == chooser.wire else f"{settings.kind} {wire}"
            # The cost model leaves out the compute time of PowerSGD.
            electable = settings.ours and (not settings.keeps or chooser.keeps) and settings.kind != "powersgd"
            candidates.append(Candidate(name, settings, electable))
    return candidates
