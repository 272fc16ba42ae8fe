"""Hybrid all-reduce: each layer uses the collective that suits it, overlapped with backward and the next forward.

After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191). Convolutional layers are small, bound by
latency and needed first in the next forward. Fully connected layers are large, bound by bandwidth and needed last. The
former use a butterfly, the latter a ring. Either may use parameter servers instead.
"""

from __future__ import annotations

from functools import partial

import torch

from imagenet_fast.recipe.sync_config import Collective, HybridSync, fusion_bytes
from imagenet_fast.sync.engine import Bucket, Engine, alike
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot


def hybrid(settings: HybridSync, wire: torch.dtype) -> Engine:
    """Declare the engine for the policy of ``settings``.

    ``by-type`` is the thesis' rule. ``by-size`` fuses layers of all types and uses the collective that is faster for
    that many bytes on this network, which all ranks measure together.
    """
    by_type = settings.policy == "by-type"
    return Engine(
        wire, "read", fusion_bytes(settings.fuse_mb), together=is_connected if by_type else alike,
        collective=partial(_suiting if by_type else _faster, settings, wire.itemsize), servers=settings.servers,
        planned=True,
    )  # fmt: skip


def is_connected(span: ParamSlot) -> bool:
    """Return whether the slot's layer is fully connected: it has a matrix as its weight.

    The weight of a convolution or a norm is not a matrix.
    """
    assert span.module is not None, "a deferring engine's pool knows its model"
    return any(p.dim() == 2 for p in span.module.parameters(recurse=False))


def _suiting(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    return settings.large if is_connected(run[0]) else settings.small


def _faster(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    message = (run[-1].stop - run[0].start) * itemsize
    return min((settings.small, settings.large), key=lambda name: network.seconds(name, message))
