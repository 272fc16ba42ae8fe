"""A parameter whose update is pending is up to date for whoever uses it, from wherever and however."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import DearSync, EngineSettings, GradientPool, HybridSync, LazySync
from imagenet_fast.sync.pending import Pending
from tests.conftest import tiers
from tests.ranks import run, with_ranks
from tests.sync.given import pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, alike, begin, images, loss_of, ours, sgd, state, train, unmeasured

LAZY = LazySync(wire="fp32", threshold_mb=0)
DEFERRING: dict[str, EngineSettings] = {
    "hybrid": HybridSync(wire="fp32", fuse_mb=0),
    "dear": DearSync(wire="fp32", bucket_mb=0),
}
BY_ENGINE = pytest.mark.parametrize("engine", tiers(["hybrid"], DEFERRING))


def trained(make: Callable[[], nn.Module], settings: EngineSettings, steps: int = 6) -> Tensor:
    model = make()
    pool = pooled(model, settings)
    train(model, pool, sgd(model), range(steps))
    pool.settle()
    weights = weights_of(model)
    pool.close()
    return weights


class Scripted(nn.Module):
    """Its middle is read in C++, where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Listing(Layers):
    """Somebody's own ``parameters()``, which takes no arguments."""

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return (param for _, param in self.named_parameters())


class LateReader(Layers):
    """From its fourth step on it reads a weight before the layer is called that has it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x + self.layer4.bias if self.calls > 3 else x)


class Pinned(Layers):
    """Weights that are normalised by ``data`` before each forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            layer.weight.data.div_(layer.weight.data.norm())
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@BY_ENGINE
@pytest.mark.parametrize("model", [Scripted, Listing, LateReader, Pinned])
@with_ranks(2)
@unmeasured()
def test_odd_models_train_as_with_updates_at_once(model: Callable[[], nn.Module], engine: str) -> None:
    ours, expected = trained(model, DEFERRING[engine]), trained(model, LAZY)
    near = 1e-6 if model is Scripted else 0.0  # torch compiles it anew as it goes, and rounds otherwise
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=near)


@pytest.mark.ci
@BY_ENGINE
@pytest.mark.parametrize("how", ["model", "method", "block", "function"])
@with_ranks(2)
def test_compiled_models_are_updated_in_front_of_their_code(how: str, engine: str) -> None:
    """As a whole in one graph; a block by its method; and a function, whose graph breaks."""
    torch._dynamo.reset()

    def compiled() -> tuple[Callable[[Tensor], Tensor], nn.Module]:
        model = Layers()
        match how:
            case "model":
                return torch.compile(model, backend="eager", fullgraph=True), model
            case "method":
                model.compile(backend="eager", fullgraph=True)
            case "block":
                model.layer2.compile(backend="eager", fullgraph=True)
        return torch.compile(model.forward, backend="eager") if how == "function" else model, model

    ends = []
    for settings in (DEFERRING[engine].model_copy(update={"fuse_mb": "auto"} if engine == "hybrid" else {}), LAZY):
        forward, model = compiled()
        pool = pooled(forward if isinstance(forward, nn.Module) else model, settings)
        train(forward, pool, sgd(model), range(7))  # type: ignore[arg-type]
        pool.settle()
        ends.append(weights_of(model))
        pool.close()
        assert model._compiled_call_impl is None or how in ("method", "block")
    assert torch.equal(*ends)
    torch._dynamo.reset()


@with_ranks(2)
def test_bare_tensors_are_put_off_too() -> None:
    ends = []
    for settings in (DEFERRING["dear"], LAZY):
        weights = [torch.full((3,), 1.0 + n, requires_grad=True) for n in range(2)]
        pool = GradientPool([(f"w{n}", weight) for n, weight in enumerate(weights)], settings)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for step in range(4):
            pool.zero_grad()
            ((weights[0] * (step + dist.get_rank())).sin() * weights[1]).sum().backward()
            pool.step(optimizer)
        pool.settle()
        assert {type(weight) for weight in weights} == {Tensor}
        ends.append(torch.cat(weights).detach())
        pool.close()
    assert torch.equal(*ends)


def half_done() -> tuple[Layers, GradientPool, Callable[[list[nn.Parameter]], None], threading.Event]:
    """A model whose update takes its time between two halves, and what says that the first is done."""
    model, begun = Layers(), threading.Event()
    pool = pooled(model, DEFERRING["hybrid"])

    def slowly(params: list[nn.Parameter]) -> None:
        for param in params:
            param.add_(1.0)
            begun.set()
            time.sleep(0.05)
            param.add_(1.0)

    return model, pool, slowly, begun


def test_a_second_thread_waits_for_an_update_under_way():
    model, pool, slowly, begun = half_done()
    expected = {name: value + 1.0 + 1.0 for name, value in state(model).items()}
    begin(model, pool, 0)
    pool.update(slowly)
    first = threading.Thread(target=torch.no_grad()(lambda: model(images(0))))
    first.start()
    begun.wait()
    assert alike(state(model), expected)
    first.join()
    pool.close()


def test_shapes_and_the_like_are_read_without_an_update():
    model = Layers()
    pool = pooled(model, DEFERRING["hybrid"])
    begin(model, pool, 0)
    pool.step(sgd(model))
    weight = model.layer0.weight
    facts = (weight.shape, weight.dtype, weight.device, weight.grad, weight.requires_grad, weight.numel(), len(weight))
    assert facts == ((8, 8), torch.float32, torch.device("cpu"), None, True, 64, 8)
    assert isinstance(weight, Pending)
    assert isinstance(weight, nn.Parameter)
    assert weight in set(model.parameters())
    weight.data_ptr()
    assert type(weight) is nn.Parameter
    pool.close()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_copies_are_of_the_class_that_parameters_had():
    model = Layers()
    pool, optimizer = pooled(model, DEFERRING["hybrid"]), sgd(model)
    for number, copied in enumerate((copy.deepcopy, lambda model: copy.copy(model.layer0.weight))):
        begin(model, pool, number)
        pool.step(optimizer)
        made: Any = copied(model)
        for param in made.parameters() if isinstance(made, nn.Module) else [made]:
            assert type(param) is nn.Parameter
    pool.close()


@with_ranks(2)
def test_float64_is_sent_as_it_is() -> None:
    """``fp32`` says that nothing is rounded."""
    model, expected = Layers().double(), Layers().double()
    pool, optimizer, other = pooled(model, LAZY), sgd(model), sgd(expected)
    for step in range(4):
        pool.zero_grad()
        model(images(step).double()).square().sum().backward()
        pool.step(optimizer)
        other.zero_grad()
        expected(images(step).double()).square().sum().backward()
        for param in expected.parameters():
            dist.all_reduce(param.grad)
            param.grad /= 2
        other.step()
    assert torch.equal(weights_of(model), weights_of(expected))


def test_a_backward_of_one_rank_alone_is_applied_by_no_rank():
    """Not even before that rank is refused to go on: what was sent last waits for the end of its step."""
    outcomes = run(2, _alone, fresh=True)
    assert "on their way to the other ranks" in outcomes[0]
    assert outcomes[1] == "as before"


def _alone() -> str:
    model = Layers()
    pool, optimizer = pooled(model, LAZY), sgd(model)
    train(model, pool, optimizer)
    pool.zero_grad()
    before = state(model)
    loss_of(model, 3).backward()
    if dist.get_rank() == 0:
        try:
            pool.zero_grad()
        except RuntimeError as refusal:
            return str(refusal)
    threading.Thread(target=pool.step, args=(optimizer,), daemon=True).start()
    time.sleep(0.5)
    return "as before" if alike(state(model), before) else "changed"


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "expanded": lambda: torch.ones(1).expand(4),
}


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("kind", BUFFERS)
@with_ranks(2)
def test_odd_buffers_are_left_alone_and_cannot_be_broadcast(kind: str) -> None:
    from imagenet_fast.distributed.reductions import broadcast_model

    model = Layers()
    model.register_buffer("odd", BUFFERS[kind]())
    pool = pooled(model, LAZY)
    train(model, pool, ours(model))
    same_on_ranks(weights_of(model))
    with pytest.raises(ValueError, match=r"odd is quantised, sparse, nested, expanded .*; make it an ordinary tensor"):
        broadcast_model(model)
