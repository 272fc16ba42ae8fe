"""Between steps a model may be exported or traced: an update that is pending is no part of the program."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from imagenet_fast.sync import EngineSettings, GradientPool
from tests.conftest import tiers
from tests.sync.fuzz_loops import ENGINES
from tests.sync.loops import alike, images, started, state, train

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


def after_steps(settings: EngineSettings, steps: int = 4) -> tuple[nn.Module, GradientPool, torch.optim.Optimizer]:
    model, pool, optimizer = started(settings)
    train(model, pool, optimizer, range(steps))
    return model, pool, optimizer


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", tiers([HYBRID], [HYBRID, DEAR]), ids=lambda settings: settings.kind)
def test_traced_between_steps_changes_no_weight(way: str, settings: EngineSettings):
    expected, _, _ = after_steps(LAZY)
    model, pool, optimizer = after_steps(settings)
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
    assert alike(state(model), state(after_steps(LAZY, 5)[0]))


def test_a_layer_is_exported_alone_up_to_date():
    expected, _, _ = after_steps(LAZY)
    model, _, _ = after_steps(HYBRID)
    program = torch.export.export(model.layer2, (images(0),)).module()
    assert torch.equal(program(images(7)), expected.layer2(images(7)))
    assert alike(state(model), state(expected))


def test_a_cuda_graph_is_refused_until_settled():
    """A captured update cannot be kept out of the program."""
    model, pool, _ = after_steps(HYBRID)
    capturing = patch.multiple("torch.cuda", is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    with capturing, pytest.raises(RuntimeError, match=SENTENCE):
        model(images(0))
    pool.settle()
    with capturing:
        model(images(0))


SENTENCE = r"pending, and would become a part of what is traced, exported or captured .*; call pool\.settle\(\) before"
