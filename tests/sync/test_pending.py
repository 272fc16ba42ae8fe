"""A parameter whose update is pending is up to date for whoever uses it, from wherever and however."""

from __future__ import annotations

import copy
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import product
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.reductions import broadcast_model
from imagenet_fast.sync import GradientPool
from imagenet_fast.sync.pending import Pending
from tests.conftest import tiers
from tests.ranks import with_ranks
from tests.sync import loops
from tests.sync.fuzz_loops import ENGINES
from tests.sync.given import pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, alike, begin, images, loss_of, ours, sgd, started, state, train, trained

LAZY, HYBRID, DEAR = (ENGINES[name] for name in ("lazy", "hybrid", "dear"))


@pytest.mark.ci
@pytest.mark.parametrize("engine", ["lazy", "hybrid auto", "dear"])
@pytest.mark.parametrize("how", ["model", "method", "block", "function", "script"])
@with_ranks(2)
@loops.unmeasured()
@torch.jit.optimized_execution(False)  # which rounds in another way
def test_compiled_models_are_pooled_as_they_are_and_updated_in_front_of_their_code(how: str, engine: str) -> None:
    """As a whole in one graph; a block by its method; a function, whose graph breaks; and a model of scripts."""
    torch._dynamo.reset()
    model = Layers()
    called: Any = model
    match how:
        case "model":
            called = torch.compile(model, backend="eager", fullgraph=True)
        case "method":
            model.compile(backend="eager", fullgraph=True)
        case "block":
            model.layer2.compile(backend="eager", fullgraph=True)
        case "function":
            called = torch.compile(model.forward, backend="eager")
        case "script":
            parts = [part for layer in model.children() for part in (layer, nn.Tanh())]
            called = model = torch.jit.script(nn.Sequential(*parts))
    pool, (expected, plain, optimizer) = pooled(model if how == "function" else called, ENGINES[engine]), started(LAZY)
    assert {slot.name for slot in pool.slots} == dict(model.named_parameters()).keys()
    train(called, pool, sgd(model), range(7))
    train(expected, plain, optimizer, range(7))
    assert torch.equal(weights_of(model), weights_of(expected))
    torch._dynamo.reset()


def test_an_update_that_is_kept_settles_nothing_of_a_later_step():
    model, pool, optimizer = trained(HYBRID, 1)
    kept = pool.pending
    train(model, pool, optimizer, range(1, 2))
    kept.settle([model.layer0.weight])
    kept.settle()
    assert isinstance(model.layer0.weight, Pending)
    assert torch.equal(model.layer0.weight, trained(LAZY, 2)[0].layer0.weight)


@pytest.mark.ci
@pytest.mark.parametrize("engine", ["hybrid", "dear", "sparse hybrid"])
@with_ranks(2)
def test_a_thread_reads_all_the_time_while_others_run_forwards(engine: str) -> None:
    ends, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for settings in (ENGINES["sparse"] if "sparse" in engine else LAZY, ENGINES[engine]):
        towers, done = nn.ModuleList([Layers(), Layers()]), threading.Event()
        pool, optimizer = pooled(towers, settings), ours(towers)
        with ThreadPoolExecutor(3) as threads:

            @torch.no_grad()
            def read(towers: Any = towers, optimizer: Any = optimizer, done: Any = done) -> None:
                while not done.is_set():
                    (towers.state_dict(), optimizer.state_dict(), loss_of(towers[0], 0))

            reader = threads.submit(read)
            for step in range(30):
                pool.zero_grad()
                torch.stack([*threads.map(loss_of, towers, (step, step))]).sum().backward()
                pool.step(optimizer)
            done.set()
            reader.result()
        ends.append(weights_of(towers))
        same_on_ranks(ends[-1])
    sys.setswitchinterval(interval)
    assert torch.equal(*ends) or "sparse" in engine, "its chunks are of the order in which threads record"


def at_each_line(modules: str, act: Callable[[], object]) -> Iterator[AbstractContextManager[None]]:
    """Contexts of something done again and again, with ``act`` in front of another line of ``modules`` each time."""
    seen: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and re.search(f"imagenet_fast/sync/({modules})", place[0]) and place not in seen:
            seen.add(place)
            sys.settrace(None)
            act()
        return trace

    @contextmanager
    def watched() -> Iterator[None]:
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)

    count = -1
    while count < len(seen):
        count = len(seen)
        yield watched()
    assert count > 20


MODULES = tiers(["pending"], ["pool|gradient_step|per_param_step|bucket_scheduler|sparse"])


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("engine", tiers(["hybrid"], ["dear", "sparse hybrid"]))
def test_a_signals_handler_may_read_at_every_line_of_a_step(engine: str, modules: str):
    model, pool, optimizer = started(ENGINES[engine], ours)
    for number, watched in enumerate(at_each_line(modules, lambda: (model.state_dict(), optimizer.state_dict()))):
        with watched:
            train(model, pool, optimizer, range(number, number + 1))
    assert alike(state(model), state(trained(ENGINES[engine], number + 1, ours)[0]))


@pytest.mark.parametrize("modules", MODULES)
def test_an_update_that_is_interrupted_at_any_line_is_whole_or_told(modules: str):
    """By Ctrl-C, say: it is carried out later, or refused."""
    expected, _, _ = trained(LAZY)
    for watched in at_each_line(modules, Mock(side_effect=KeyboardInterrupt)):
        model, pool, _ = trained(HYBRID)
        with suppress(KeyboardInterrupt), watched:
            model(images(3))
        is_whole = alike(state(model), state(expected))
        with suppress(RuntimeError) if is_whole else pytest.raises(RuntimeError, match="failed halfway"):
            pool.zero_grad()


class Slow(torch.optim.SGD):
    """It tells when it is at work."""

    one_by_one = True

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, weight_decay=0.05)
        self.begun = threading.Event()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.begun.set()
        time.sleep(0.2)
        super().step()


def test_a_second_thread_waits_for_an_update_under_way_and_its_schedule_may_go_on():
    model, pool, optimizer = trained(HYBRID, 1, lambda model: Slow(model.parameters()))
    expected, _, _ = trained(LAZY, 1)
    first = threading.Thread(target=pool.settle)
    first.start()
    optimizer.begun.wait()
    optimizer.param_groups[0]["lr"] = 0.01
    assert alike(state(model), state(expected))
    first.join()
    assert optimizer.param_groups[0]["lr"] == 0.01
    pool.close()


@pytest.mark.parametrize("keep", [lambda p: p.data, lambda p: torch.from_numpy(p.detach().numpy()), lambda p: p[:]])
def test_what_shares_memory_with_parameters_is_never_behind(keep: Callable[[Tensor], Tensor]):
    """As an average over what was kept from the start."""
    ends = []
    for settings in (LAZY, HYBRID):
        model, pool, optimizer = started(settings)
        kept, average = [*map(keep, model.parameters())], torch.zeros(8)
        for step in range(4):
            train(model, pool, optimizer, range(step, step + 1))
            for value in kept:
                average.lerp_(value.detach().view(-1, 8).sum(0), 0.5)
        ends.append(average)
        del kept, value
    assert torch.equal(*ends)
    train(model, pool, optimizer, range(1))
    assert isinstance(model.layer0.weight, Pending), "nobody holds it any longer"
    model.share_memory()  # with another process
    train(model, pool, optimizer, range(1))
    assert not isinstance(model.layer0.weight, Pending)


def test_shapes_and_the_like_are_read_without_an_update_and_copies_after_it():
    model = Layers()
    pool, optimizer, weight = pooled(model, HYBRID), sgd(model), model.layer0.weight
    train(model, pool, optimizer, range(1))
    facts = (weight.shape, weight.dtype, weight.device, weight.grad, weight.requires_grad, weight.numel(), len(weight))
    assert facts == ((8, 8), torch.float32, torch.device("cpu"), None, True, 64, 8)
    assert isinstance(weight, Pending)
    assert isinstance(weight, nn.Parameter)
    assert weight in set(model.parameters())
    weight.data_ptr()
    assert type(weight) is nn.Parameter
    for copied in (copy.copy, copy.deepcopy):
        train(model, pool, optimizer, range(1, 2))
        assert type(copied(weight)) is nn.Parameter
    pool.close()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


@torch.jit.script
def shifted(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


class Unseen(nn.Module):
    """It reads its bias where no torch function is called, before a neighbour's read settles both, or after."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.bias, self.linear = early, nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(shifted(x, self.bias)) if self.early else shifted(self.linear(x), self.bias)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("engine", ["hybrid", "dear"])
def test_a_read_that_is_not_seen_is_refused_wherever_it_is(engine: str, early: bool):
    model = Unseen(early)
    with closing(GradientPool(model, ENGINES[engine])) as pool:
        for _ in range(3):
            train(model, pool, sgd(model), range(1))
            pool.settle()
        train(model, pool, sgd(model), range(1))
        with pytest.raises(RuntimeError, match=r"gradient of bias is of the values before .*pool\.settle\(\)"):
            begin(model, pool, 0)
        pool.drop()


class Unused(Layers):
    """Its first parameter, and so the last one in the pool, is used by no rank."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"unused": nn.Linear(2, 2), **self._modules}


@pytest.mark.parametrize(
    ("kind", "engine"), tiers([(Unused, "hybrid")], product((Layers, Unused), ("lazy", "hybrid", "dear")))
)
@with_ranks(2, fresh=True)
def test_a_backward_of_one_rank_alone_is_applied_by_no_rank(kind: type[Layers], engine: str):
    """Not even before that rank is refused to go on: what was sent last waits for the end of its step."""
    model = kind()
    pool, optimizer = GradientPool(model, ENGINES[engine]), sgd(model)  # never closed, as it would wait
    train(model, pool, optimizer, range(7))
    pool.settle()
    pool.zero_grad()
    before = state(model)
    loss_of(model, 3).backward()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="on their way to the other ranks"):
            pool.zero_grad()
        return

    def go_on() -> None:
        pool.step(optimizer)
        model(images(4))

    threading.Thread(target=go_on, daemon=True).start()
    time.sleep(0.5)
    with torch._C.DisableTorchFunctionSubclass():  # else the update would be waited for here
        assert alike(state(model), before)


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
    model = Layers()
    model.register_buffer("odd", BUFFERS[kind]())
    pool = pooled(model, LAZY)
    train(model, pool, ours(model))
    same_on_ranks(weights_of(model))
    with pytest.raises(ValueError, match=r"odd is quantised, sparse, nested, expanded .*; make it an ordinary tensor"):
        broadcast_model(model)
