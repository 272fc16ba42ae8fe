"""Buckets and messages, and the step time that the cost model predicts from them.

Both read the slots of a pool and the sizes of its topology. No engine is built. No process group is made, except to
measure a collective that was not measured on this network before.
"""

from __future__ import annotations

import torch

from imagenet_fast.cost_model import messages
from imagenet_fast.cost_model.step_prediction import StepModel
from imagenet_fast.sync.all_reduce import format_of
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot

BucketChunk = messages.BucketChunk[ParamSlot]
"""One message: a piece of a bucket, or one half of that piece's all-reduce."""


def step_model(
    engine: Engine, pool: GradientBuffer, wire: torch.dtype, network: NetworkProbe, share: float = 1.0
) -> StepModel[ParamSlot]:
    """Return a model of the engine's step, which builds its messages and predicts its time.

    Args:
        engine: The engine's declaration. If it has a bucket size of its own, only that is predicted.
        pool: The pool whose gradients are sent.
        wire: Dtype in which values are sent.
        network: The costs of collectives and codecs, measured when they are first needed.
        share: Share of the values that the engine sends.
    """
    return StepModel(
        engine, pool.slots, pool.alignment, pool.topology.layout, format_of(wire), network, lambda: network.codec(wire),
        share,
    )  # fmt: skip
