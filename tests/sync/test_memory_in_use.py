"""What another thread or stream still reads is not given back. Streams themselves: `tests/gpu/test_streams.py`."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from imagenet_fast.sync import SparseSync
from imagenet_fast.sync.channel import Traffic
from imagenet_fast.sync.engines.sparse import Sparse
from tests.sync.loops import Layers, loss_of, pooled


def test_norms_are_kept_until_the_agreement_on_them_has_read_them(monkeypatch: pytest.MonkeyPatch):
    model = Layers()
    pool = pooled(model, SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0))
    engine = pool._engine
    assert isinstance(engine, Sparse)
    norms: list[weakref.ref[Tensor]] = []
    gate = threading.Event()

    def of_what_was_sent(values: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if "out" in options:
            return vector_norm(values, *arguments, **options)
        if not norms:  # the agreement comes after this
            engine._packing.enter(lambda: gate.wait() and None, None, Traffic())
        result = vector_norm(values, *arguments, **options)
        norms.append(weakref.ref(result))
        return result

    vector_norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", of_what_was_sent)
    try:
        loss_of(model, 0).backward()
        pool.finish()
        pool.update(lambda params, elements=None: None)
        model(torch.ones(1, 8))
        gc.collect()
        assert norms
        assert all(norm() is not None for norm in norms)
    finally:
        gate.set()
    pool.zero_grad()
    loss_of(model, 1).backward()
    pool.finish()
    gc.collect()
    assert norms[0]() is None, "but no longer"
