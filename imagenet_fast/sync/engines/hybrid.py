"""Hybrid all-reduce: each layer by the collective that suits it, overlapped with backward and with the next forward.

After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191): convolutional layers are small, bound by
latency and needed first in the next forward; fully connected ones are large, bound by bandwidth and needed last.
The former go through a butterfly, the latter through a ring; either may be sent through parameter servers instead.
"""

from __future__ import annotations

from functools import partial

import torch

from imagenet_fast.recipe.sync_config import Collective, HybridSync, fusion_bytes
from imagenet_fast.sync.engine import Bucket, Engine, alike
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot


def hybrid(settings: HybridSync, wire: torch.dtype) -> Engine:
    """``by-type`` is the thesis' rule; ``by-size`` fuses layers of all types and takes what is faster for that many
    bytes on this network, which is measured by all ranks together."""
    by_type = settings.policy == "by-type"
    return Engine(
        wire, "read", fusion_bytes(settings.fuse_mb), together=is_connected if by_type else alike,
        collective=partial(_suiting if by_type else _faster, settings, wire.itemsize), servers=settings.servers,
        planned=True,
    )  # fmt: skip


def is_connected(span: ParamSlot) -> bool:
    """Whether it is of a fully connected layer, whose weight is a matrix, and not of a convolution or a norm."""
    assert span.module is not None, "a deferring engine's pool knows its model"
    return any(p.dim() == 2 for p in span.module.parameters(recurse=False))


def _suiting(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    return settings.large if is_connected(run[0]) else settings.small


def _faster(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    message = (run[-1].stop - run[0].start) * itemsize
    return min((settings.small, settings.large), key=lambda name: network.seconds(name, message))
