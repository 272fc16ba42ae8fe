"""What a loop cannot do with a pool is refused by a sentence that says what to do instead; what looks odd and can be
done, is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import (
    AutoSync,
    DdpSync,
    Engine,
    EngineSettings,
    GradientPool,
    LazySync,
    PowerSgdSync,
    SparseSync,
    attach,
    build_engine,
)
from imagenet_fast.training.optimizers import LARS, SGD
from tests.ports import free_port
from tests.ranks import run
from tests.sync.given import on_ranks, pooled, same_on_ranks, tiers, weights_of, with_ranks
from tests.sync.loops import DEAR, DENSE, HYBRID, LAZY, Layers, alike, loss_of, sgd, state, unmeasured

ENGINES: dict[str, EngineSettings] = {
    "lazy": LAZY,
    "hybrid": HYBRID,
    "dear": DEAR,
    "int8": LazySync(wire="int8"),
    "powersgd": PowerSgdSync(timing="lazy", dense_epochs=0),
    "sparse": SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0),
    "sparse, all sent": DENSE,
    "sparse, corrected": SparseSync(wire="fp32", momentum_correction=True, momentum=0.9, chunk=16, dense_epochs=0),
}
Wrong = Iterator[tuple[Any, ...]]
"""Of a loop that goes on afterwards, what it must not call, and the arguments."""


@dataclass(frozen=True)
class Refusal:
    loop: Callable[[EngineSettings], Wrong]
    sentence: str
    engines: tuple[str, ...]
    error: type[Exception]


REFUSALS: dict[str, Refusal] = {}


def refused(sentence: str, *engines: str, error: type[Exception] = ValueError) -> Callable[[Any], Any]:
    """Add a loop to those that `test_refused` runs under these engines on two ranks."""

    def add(loop: Callable[[EngineSettings], Wrong]) -> None:
        REFUSALS[loop.__name__.replace("_", " ")] = Refusal(loop, sentence, engines or ("lazy",), error)

    return add


def begin(model: Callable[..., Tensor], pool: GradientPool, step: int) -> None:
    pool.zero_grad()
    loss_of(model, step).backward()


def train(model: nn.Module, pool: GradientPool, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        begin(model, pool, step)
        pool.step(optimizer)


def started(settings: EngineSettings, kind: Any = sgd) -> tuple[Layers, GradientPool, Any]:
    model = Layers()
    return model, pooled(model, settings), kind(model)


def ours(model: nn.Module, **changes: Any) -> SGD:
    """What ``sparse`` can do with."""
    return SGD(model.parameters(), **{"lr": 0.1} | changes)


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("as if there were no memory left")


# What a pool and an engine are made of


def changed(change: Callable[[Any], object]) -> Layers:
    model = Layers()
    change(model)
    return model


class Sharded(nn.Parameter):
    """As torch's fully_shard makes them."""

    placements = ("Shard(0)",)


def made_of(sentence: str, *models: Callable[[], Any], error: type[Exception] = ValueError) -> Refusal:
    return Refusal(lambda _: ((GradientPool, model()) for model in models), sentence, ("lazy",), error)


NAMED = [*Layers().named_parameters()]
REFUSALS |= {
    "parameters without names": made_of(
        r"parameters have no names; give the pool the model.*named_parameters",
        lambda: Layers().parameters(), lambda: [*Layers().parameters()], error=TypeError,
    ),
    "two parameters of one name": made_of(  # only one of them would be trained
        r"two parameters are named layer0\.weight; give each a name of its own",
        lambda: [*NAMED, *Layers().named_parameters()],
    ),
    "a layer of another dtype": made_of(
        r"share a dtype.*layer2\.\w+ is of torch.float\d\d on cpu beside torch.float\d\d on cpu; make",
        lambda: changed(lambda model: model.layer2.double()),
    ),
    "complex numbers": made_of(
        r"cannot hold torch\.complex64.*view_as_real", lambda: nn.Linear(2, 2, dtype=torch.complex64)
    ),
    "nothing to train": made_of("no trainable parameter", nn.ReLU, lambda: Layers().requires_grad_(False)),
    "parameters that are shards": made_of(
        "weight is a DTensor, as fully_shard makes them",
        lambda: changed(lambda model: setattr(model.layer0, "weight", Sharded(model.layer0.weight.detach()))),
    ),
    "gradients of another dtype": made_of(
        r"weight is of torch.bfloat16 and its grad_dtype torch.float32; leave",
        lambda: changed(lambda model: setattr(model.bfloat16().layer0.weight, "grad_dtype", torch.float32)),
    ),
}  # fmt: skip


@refused(r"is no engine for a pool; give the settings of one, such as LazySync\(\)", error=TypeError)
def what_is_no_engine(_: EngineSettings) -> Wrong:
    for given in ("hybrid", LazySync, DdpSync(), None):
        yield build_engine, given, GradientPool(Layers())


@refused(r"give pool.attach what build_engine\(settings, pool\) returns", error=TypeError)
def what_is_not_yet_an_engine(_: EngineSettings) -> Wrong:
    for given in ("hybrid", LazySync, DdpSync(), None):
        yield GradientPool(Layers()).attach, given


def test_one_parameter_given_twice_is_one():
    assert len(GradientPool([*NAMED, *NAMED]).slots) == len(NAMED)


def test_a_pool_without_the_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    for alone in ("", "0", "1"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        GradientPool(Layers()).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = r"WORLD_SIZE is 2, .*; call torch\.distributed\.init_process_group\(\) before"
    with pytest.raises(ValueError, match=told):
        GradientPool(Layers())


@pytest.mark.ci
def test_a_pool_made_before_the_ranks_met_is_refused(tmp_path: Path):
    run(2, _too_early, tmp_path / "store", fresh=True)


def _too_early(store: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    del os.environ["WORLD_SIZE"]
    model, pool, _ = started(LAZY)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="this pool was made before the process group, so each of 2 ranks"):
        begin(model, pool, 0)


# Steps


@refused("the optimizer would add it again; give imagenet_fast's SGD corrected=True", "sparse, corrected")
def momentum_that_gradients_have_already(settings: EngineSettings) -> Wrong:
    model, pool, _ = started(settings)
    begin(model, pool, 0)
    yield pool.step, ours(model, momentum=0.9)
    yield pool.step, LARS(model.parameters(), lr=0.1, momentum=0.9)
    pool.step(ours(model, momentum=0.9, corrected=True))


@refused("sends a part of the gradients, and optimizers of torch would apply the rest as well", "sparse")
def an_optimizer_of_torch_where_a_part_is_sent(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings)
    begin(model, pool, 0)
    yield pool.step, optimizer
    pool.step(ours(model))


@refused("a GradScaler would apply the rest as well", "sparse")
def a_scaler_where_a_part_is_sent(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings, ours)
    begin(model, pool, 0)
    yield pool.step, optimizer, torch.amp.GradScaler("cpu")
    pool.step(optimizer)


@refused(r"LBFGS\.step\(\) requires a closure")
def an_optimizer_that_asks_for_more_gradients(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings)
    begin(model, pool, 0)
    yield pool.step, torch.optim.LBFGS(model.parameters())
    pool.step(optimizer)


@refused("another pool has updated this scaler since the backward")
def two_pools_that_update_one_scaler_in_turns(settings: EngineSettings) -> Wrong:
    for shared in (True, False):
        (one, first, _), (other, second, _) = started(settings), started(settings)
        everything = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
        optimizers = [everything, everything] if shared else [sgd(one), sgd(other)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for pool in (first, second):
            pool.zero_grad()
        scaler.scale(loss_of(one, 0) + loss_of(other, 0)).backward()
        for pool in (first, second):
            pool.finish()
        first.step(optimizers[0], scaler)
        yield second.step, optimizers[1], scaler
        second.zero_grad()
        scaler.scale(loss_of(other, 1)).backward()
        if shared:
            second.finish()
        else:
            second.step(optimizers[1], scaler)  # after a backward of its own


@refused(r"a second optimizer would be unscaled by the next step's scale; call pool.finish\(\), scaler.step")
def two_optimizers_with_one_scaler(settings: EngineSettings) -> Wrong:
    """`pool.step` with a scaler updates it."""
    model, pool, _ = started(settings)
    first, second = sgd(model.layer0), sgd(model.layer1)
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    pool.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    pool.step(first, scaler)
    yield pool.step, second, scaler
    yield pool.step, second


@refused(r"is frozen and has an old gradient, which would be applied; set its \.grad")
def a_frozen_layer_with_an_old_gradient(settings: EngineSettings) -> Wrong:
    model = Layers()
    loss_of(model, 0).backward()
    model.layer0.requires_grad_(False)
    pool, optimizer = pooled(model, settings), sgd(model)
    yield pool.step, optimizer
    for param in model.layer0.parameters():
        param.grad = None
    train(model, pool, optimizer)


@refused(r"layer4\.\w+ .*create_graph=True.*torch\.autograd\.grad", "lazy", "hybrid", "sparse", error=RuntimeError)
def a_gradient_that_is_part_of_a_graph(settings: EngineSettings) -> Wrong:
    ends = []
    for bent in (True, False):
        model, pool, optimizer = started(settings, ours)
        for step in range(4):
            pool.zero_grad()
            loss = loss_of(model, step)
            if bent and step == 2:
                yield loss.backward, None, None, True
                model.zero_grad()
                pool.zero_grad()
                loss = loss_of(model, step)
            loss.backward()
            pool.step(optimizer)
        pool.settle()
        ends.append(weights_of(model))
    assert torch.equal(*ends) or settings.kind == "sparse"


@refused(r"0\.weight is sparse.*sparse=False", "lazy", "hybrid", "sparse", error=RuntimeError)
def a_gradient_that_is_sparse(settings: EngineSettings) -> Wrong:
    table = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    pool = pooled(table, settings)
    pool.zero_grad()
    yield (table(torch.tensor([1, 2])).sum().backward,)
    pool.zero_grad()


@refused(r"an update of .* failed halfway, and its weights are of no step; go on from a checkpoint", "hybrid",
         error=RuntimeError)  # fmt: skip
def an_update_that_failed(settings: EngineSettings) -> Wrong:
    """Under a deferring engine it fails in the next forward, and a loop that skips that batch would lose it."""
    model, pool, optimizer = started(settings)
    for step in range(3, 5):
        train(model, pool, optimizer)
        with patch.object(sys.modules["torch.optim.sgd"], "sgd", _no_memory), pytest.raises(MemoryError):
            loss_of(model, step)
        if step == 3:
            yield (pool.zero_grad,)
            pool.zero_grad()  # told once
    model.load_state_dict(Layers().state_dict())  # as from a checkpoint
    pool.zero_grad()


@refused("cannot drop this step: the other ranks have its gradients and apply", error=RuntimeError)
def a_drop_of_gradients_that_other_ranks_have(settings: EngineSettings) -> Wrong:
    """As of an exception between finish and step on one rank, say in clipping: ranks would end with other weights."""
    model, pool, optimizer = started(settings)
    for step in range(3):
        begin(model, pool, step)
        pool.finish()
        if step == 1 and dist.get_rank() == 1:
            yield pool.zero_grad, True
        pool.step(optimizer)
    same_on_ranks(weights_of(model))


# States


@refused("attach an engine before", error=AssertionError)
def the_state_of_a_pool_without_an_engine(_: EngineSettings) -> Wrong:
    pool = GradientPool(Layers())
    yield (pool.state_dict,)
    yield pool.load_state_dict, {}


@refused(r"is no state of a pool.*pool\.state_dict")
def the_state_of_a_model(settings: EngineSettings) -> Wrong:
    model, pool, _ = started(settings)
    yield pool.load_state_dict, model.state_dict()


@refused("would lose this step's gradients; save after", "sparse", error=RuntimeError)
def a_save_between_finish_and_step(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings, ours)
    for step in range(3):
        pool.zero_grad()
        pool.state_dict()
        loss_of(model, step).backward()
        pool.finish()
        yield (pool.state_dict,)
        pool.step(optimizer)
        pool.state_dict()


def kept(settings: EngineSettings) -> dict[str, Any]:
    """By a pool, after some steps."""
    corrected = settings.velocity_momentum is not None
    model, pool, _ = started(settings)
    train(model, pool, ours(model, momentum=0.9, corrected=corrected))
    return copy.deepcopy(pool.state_dict())


@refused(r"state is of another engine than .*; attach that engine", *ENGINES)
def a_state_of_another_engine(settings: EngineSettings) -> Wrong:
    state = kept(settings)
    for other in ENGINES.values():
        pool = pooled(Layers(), other)
        if (settings.kind == "sparse") == (other.kind == "sparse"):
            pool.load_state_dict(copy.deepcopy(state))
        else:
            yield pool.load_state_dict, state
        pool.close()


@pytest.mark.parametrize("engine", ["lazy", "int8", "sparse", "powersgd"])
def test_a_residual_of_other_ranks_is_refused(engine: str):
    """One rank's file has one rank's residual: the others' would be lost, and its own counted too much."""
    state, _ = on_ranks(2, kept, ENGINES[engine])
    pool = pooled(Layers(), ENGINES[engine])
    if engine == "lazy":
        pool.load_state_dict(state)
    else:
        with pytest.raises(ValueError, match="did not send, and here are 1; go on with 2, or merge"):
            pool.load_state_dict(state)
    pool.close()


@refused(r"auto had chosen .* attach auto")
def a_state_of_auto_after_its_choice(settings: EngineSettings) -> Wrong:
    state = copy.deepcopy(elected()[1].state_dict())
    assert state["elected"]
    yield pooled(Layers(), settings).load_state_dict, state


@refused(r"auto had chosen butterflies.*which is not among")
def a_choice_that_auto_no_longer_has(_: EngineSettings) -> Wrong:
    state = copy.deepcopy(elected()[1].state_dict())
    yield pooled(Layers(), AUTO).load_state_dict, state | {"elected": "butterflies"}


AUTO = AutoSync(wire="fp32")


def elected() -> tuple[nn.Module, GradientPool, torch.optim.Optimizer]:
    """Some steps after the choice."""
    model, pool, optimizer = started(AUTO)
    train(model, pool, optimizer, range(9))
    return model, pool, optimizer


EVERY = [(name, engine) for name, refusal in REFUSALS.items() for engine in refusal.engines]
FIRST = [case for case in EVERY if case[0] != "a state of another engine" or case[1] in ("lazy", "sparse")]


@pytest.mark.parametrize(("name", "engine"), tiers(FIRST, EVERY))
@with_ranks(2)
@unmeasured()
def test_refused(name: str, engine: str) -> None:
    refusal, told = REFUSALS[name], torch.tensor(0)
    for wrong, *arguments in refusal.loop(ENGINES[engine]):
        with pytest.raises(refusal.error, match=refusal.sentence):
            wrong(*arguments)
        told += 1
    dist.all_reduce(told)
    assert told > 0


# What looks odd and can be done


@pytest.mark.ci
@pytest.mark.parametrize("engine", ["lazy", "hybrid", "dear"])
@with_ranks(2)
@unmeasured()
def test_a_compiled_model_is_pooled_as_the_model_that_it_compiles(engine: str) -> None:
    torch._dynamo.reset()
    (expected, plain, other), model = started(LAZY), Layers()
    compiled = torch.compile(model, backend="eager")
    pool, optimizer = pooled(compiled, ENGINES[engine]), sgd(model)
    assert {slot.name for slot in pool.slots} == dict(model.named_parameters()).keys()
    train(compiled, pool, optimizer, range(5))
    train(expected, plain, other, range(5))
    pool.settle()
    assert alike(state(model), state(expected))
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ["sparse", "hybrid"])
@with_ranks(2)
@unmeasured()
def test_a_disabled_scaler_is_none(engine: str) -> None:
    """AMP templates make one for every dtype; with it sparse would refuse, and hybrid update at once."""
    settings = ENGINES[engine]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    (one, first, optimizer), (other, second, others) = started(settings, ours), started(settings, ours)
    for step in range(3):  # of two pools, which would lose a scale
        first.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(one, step) + loss_of(other, step)).backward()
        first.step(optimizer, scaler)
        second.step(others, scaler)
    if settings == HYBRID:
        assert first.reducer.deferral is not None
        assert first.reducer.deferral.waits(first.slots[0])


@with_ranks(2)
def test_two_optimizers_may_step_by_hand_with_one_scaler() -> None:
    ends = []
    for pools in (True, False):
        model, scaler = Layers(), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)
        pool = pooled(model, LAZY) if pools else None
        optimizers = [sgd(model.layer0), sgd(model.layer1)]
        scaler.scale(model(torch.ones(3, 8)).square().sum()).backward()
        if pool is not None:
            pool.finish()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**11
        ends.append(weights_of(model))
    assert torch.equal(*ends)


def test_a_model_whose_engine_could_not_be_built_is_free_for_another():
    model = nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError):
        attach(model, Engine(torch.float32, "backward", 1e6, group_key=lambda slot: 1 // 0))
    _, sync = attach(model, LazySync(wire="fp32"))
    sync.close()


@with_ranks(2)
@unmeasured()
def test_the_state_of_auto_is_loaded_before_and_after_its_choice() -> None:
    model, pool, optimizer = elected()
    saved, weights = copy.deepcopy(pool.state_dict()), state(model)
    momenta, ends = copy.deepcopy(optimizer.state_dict()), []
    for again, loaded, other in (started(AUTO), elected()):
        again.load_state_dict(weights)
        other.load_state_dict(copy.deepcopy(momenta))
        loaded.load_state_dict(copy.deepcopy(saved))
        train(again, loaded, other)
        loaded.settle()
        ends.append(weights_of(again))
    assert torch.equal(*ends)


@pytest.mark.parametrize("how", ["list", "compiled", "compiled, by name"])
@with_ranks(2)
def test_ranks_that_fail_before_and_in_backward_stay_in_step(how: str) -> None:
    """Also where the pool's model is not called itself."""
    torch._dynamo.reset()
    inner = Layers()
    forward = inner if how == "list" else torch.compile(inner, backend="eager")
    if "name" in how:
        pool = GradientPool(inner.named_parameters(), model=forward)
        pool.attach(build_engine(LAZY, pool))
    else:
        pool = pooled(nn.ModuleList([inner]) if how == "list" else forward, LAZY)
    optimizer = sgd(inner)
    for step in range(4):
        pool.zero_grad()
        loss = loss_of(forward, step)
        if step == 2:
            if dist.get_rank() == 1:
                hook = inner.layer2.weight.register_hook(_no_memory)
                with pytest.raises(MemoryError):
                    loss.backward()
                hook.remove()
            continue
        loss.backward()
        pool.step(optimizer)
    pool.close()
    same_on_ranks(weights_of(inner))
    torch._dynamo.reset()


@pytest.mark.parametrize("zeroes", [False, True], ids=["", "zeroed before"])
@pytest.mark.parametrize("missing", [0, 2], ids=["at first", "later"])
@pytest.mark.parametrize("engine", ["lazy", "hybrid"])
@with_ranks(2)
@unmeasured()
def test_a_step_that_one_rank_never_began_is_dropped_by_all(engine: str, missing: int, zeroes: bool) -> None:
    """Say for a bad image: no forward has run there that the pool could have seen."""
    model, pool, optimizer = started(ENGINES[engine])
    pool.guard(3e38)
    taken = 0
    for step in range(4):
        if zeroes:
            pool.zero_grad()
        if step == missing and dist.get_rank() == 1:
            pool.zero_grad(drop=True)
            continue
        begin(model, pool, step)
        pool.finish()
        assert pool.found_inf is not None
        if pool.found_inf:
            assert step == missing
            continue
        pool.step(optimizer)
        taken += 1
    pool.settle()
    assert taken == 3
    same_on_ranks(weights_of(model))


@pytest.mark.parametrize("engine", ["lazy", "hybrid"])
@with_ranks(2)
def test_an_update_ends_the_backward_itself(engine: str) -> None:
    """Without ``end_backward`` before it, ranks applied gradients of their own."""
    model, pool, _ = started(ENGINES[engine])
    for step in range(3):
        begin(model, pool, step)
        pool.update(lambda params: [param.data.sub_(0.1 * param.grad) for param in params])
    pool.settle()
    same_on_ranks(weights_of(model))


PROGRAM = """
import sys, time
import torch.distributed as dist
from tests.sync.test_refusals import HYBRID, started, train

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
model, pool, optimizer = started(HYBRID)
train(model, pool, optimizer, range(4))
if sys.argv[2] == "0":
    time.sleep(1)
"""
CLOSED_LATE = """
dist.destroy_process_group()
pool.close()
"""


@pytest.mark.ci
@pytest.mark.parametrize("end", ["", CLOSED_LATE], ids=["never closed", "closed after the group"])
def test_ranks_end_well_whatever_becomes_of_their_pools(end: str):
    """An abort of the first to end would make torchrun kill the others, which may be saving."""
    with free_port() as port:
        command = [sys.executable, "-c", PROGRAM + end, str(port)]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        for rank in ranks:
            _, told = rank.communicate(timeout=120)
            assert (rank.returncode, "Traceback" in told) == (0, False), told
