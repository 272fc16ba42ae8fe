"""The step time of an engine on a pool, predicted by the cost model from the engine's own messages.

It reads the pool's slots and the sizes of its topology. No engine is built. No process group is made, except to measure
a collective that was not measured on this network before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from imagenet_fast.cost_model import step_prediction
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.step_prediction import StepModel
from imagenet_fast.sync.all_reduce import format_of
from imagenet_fast.sync.bucketing import BucketChunk
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot


def predict_best(
    engine: Engine, pool: GradientPool, wire: torch.dtype, timing: Timing, network: NetworkProbe, share: float = 1.0
) -> tuple[float, float]:
    """Return the best bucket size in bytes on the wire, and the predicted seconds of a step with it.

    Args:
        engine: The engine's declaration. If it has a bucket size of its own, only that is predicted.
        pool: The pool whose gradients are sent.
        wire: Dtype in which values are sent.
        timing: The course of a step.
        network: The costs of collectives and codecs.
        share: Share of the values that the engine sends.
    """
    return _model(engine, pool, wire, network, share).best(timing)


def predict(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, timing: Timing, network: NetworkProbe,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Return the seconds of a step, predicted by the cost model, with buckets of ``fuse`` bytes on the wire.

    The other arguments are those of ``predict_best``.
    """
    return _model(engine, pool, wire, network, share).step_s(fuse, timing)


def releases_of(
    engine: Engine, messages: Sequence[BucketChunk], timing: Timing, network: NetworkProbe
) -> list[list[int]]:
    """Return the numbers of the messages launched at each event: every push, then the end of backward."""
    return step_prediction.releases_of(engine.declaration, messages, timing, network)


def thresholds(engine: Engine, pool: GradientPool) -> list[float]:
    """Return the bucket sizes to choose from, in bytes on the wire."""
    return step_prediction.thresholds(engine.declaration, pool.topology.layout)


def _model(
    engine: Engine, pool: GradientPool, wire: torch.dtype, network: NetworkProbe, share: float = 1.0
) -> StepModel[ParamSlot]:
    return StepModel(
        engine.declaration, pool.spans, pool.line, pool.topology.layout, format_of(wire), network,
        lambda: network.codec(wire), share,
    )  # fmt: skip
