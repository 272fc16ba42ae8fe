"""What another thread or stream still reads is not given back. Streams themselves: `tests/gpu/test_streams.py`."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from imagenet_fast.sync import SparseSync
from imagenet_fast.sync.comm_stream import CommStats
from tests.sync.given import engine_of, pooled, with_ranks
from tests.sync.loops import Layers, loss_of


@with_ranks(2)
def test_chunks_on_their_way_are_kept_until_they_have_landed():
    model = Layers()
    pool = pooled(
        model, SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0, timing="hybrid")
    )
    engine = engine_of(pool)
    for step in range(2):  # in the first there is no telling who reads what
        gate = threading.Event()
        engine._topology.stream((), "packing").enter(lambda gate=gate: gate.wait() and None, (), CommStats())
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.end_backward()
        phases = [weakref.ref(phase) for message in engine._messages for phase in message.phases]
        gc.collect()
        assert phases
        assert all(phase() is not None for phase in phases)
        gate.set()
        pool.update(lambda params, elements=None: None)
        if step == 1:
            assert engine._messages, "the next forward waits for them"
        model(torch.ones(1, 8))
        gc.collect()
        assert all(phase() is None for phase in phases), "but no longer"
