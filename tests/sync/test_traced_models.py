"""Between steps a model may be exported or traced: an update that is pending is no part of the program."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from imagenet_fast.sync import EngineSettings
from tests.conftest import tiers
from tests.ranks import with_ranks
from tests.sync.fuzz_loops import ENGINES
from tests.sync.given import pooled
from tests.sync.loops import alike, images, ours, state, train, trained, unmeasured

LAZY, HYBRID, DEAR = (ENGINES[name] for name in ("lazy", "hybrid", "dear"))
Forward = Callable[[Tensor], Tensor]


def fake(model: nn.Module) -> Forward:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(6, 8))
    return model


WAYS: dict[str, Callable[[nn.Module], Forward]] = {
    "exported": lambda model: torch.export.export(model, (images(0),)).module(),
    "traced by jit": lambda model: torch.jit.trace(model, images(0)),
    "made by fx": lambda model: make_fx(lambda x: model(x))(images(0)),
    "traced by fx": torch.fx.symbolic_trace,
    "fake": fake,
}
REFUSED = {"traced by jit", "made by fx", "fake"}
"""The others read no value of a parameter, or all of them before they trace."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", tiers([HYBRID], [HYBRID, DEAR]), ids=lambda settings: settings.kind)
def test_traced_between_steps_changes_no_weight(way: str, settings: EngineSettings):
    expected, _, _ = trained(LAZY, 4)
    model, pool, optimizer = trained(settings, 4)
    if way in REFUSED:
        with pytest.raises(RuntimeError, match=SENTENCE):
            WAYS[way](model)
        pool.settle()
    program = WAYS[way](model)
    with torch.no_grad():
        for number in (7, 8):
            assert torch.equal(program(images(number)), expected(images(number)))
    assert alike(state(model), state(expected))
    train(model, pool, optimizer, range(4, 5))  # and training goes on
    assert alike(state(model), state(trained(LAZY, 5)[0]))


def test_a_cuda_graph_is_refused_until_settled():
    """A captured update cannot be kept out of the program."""
    model, pool, _ = trained(HYBRID, 4)
    capturing = patch.multiple("torch.cuda", is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    with capturing, pytest.raises(RuntimeError, match=SENTENCE):
        model(images(0))
    pool.settle()
    with capturing:
        model(images(0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("engine", tiers(["hybrid auto"], ["lazy", "dear", "auto", "sparse"]))
@with_ranks(1)
@unmeasured()
def test_copies_and_scripts_are_as_without_a_pool(engine: str) -> None:
    """They load where this package is not installed; and when the pool is closed, nothing of it is left."""
    model = nn.Sequential(nn.Linear(8, 8), fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8))))
    names = [{*vars(module), "__overloads__"} for module in model.modules()]  # which torch.jit adds
    pool, optimizer = pooled(model, ENGINES[engine]), ours(model)
    for step in range(3):
        train(model, pool, optimizer, range(step, step + 1))
        for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert b"imagenet_fast" not in pickle.dumps(made)
            assert torch.equal(model(images(0)), torch.jit.script(made)(images(0)))
    pool.close()
    assert [vars(module).keys() for module in model.modules()] == names
    assert not any(vars(param) for param in model.parameters())
    assert b"imagenet_fast" not in pickle.dumps(model)


SENTENCE = r"pending, and would become a part of what is traced, exported or captured .*; call pool\.settle\(\) before"
