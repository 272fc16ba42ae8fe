"""What a loop cannot do with a pool is refused by a sentence that says what to do instead; what looks odd and can be
done, is."""

from __future__ import annotations

import atexit
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imagenet_fast.parallel.ddp import attach
from imagenet_fast.sync import DdpSync, Declaration, EngineSettings, GradientPool, LazySync
from imagenet_fast.sync.contract import StepState
from tests.conftest import tiers
from tests.ports import free_port
from tests.ranks import run, with_ranks
from tests.sync import loops
from tests.sync.fuzz_loops import ENGINES
from tests.sync.given import pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, begin, images, loss_of, ours, sgd, started, state, train, trained, unmeasured

STATES = ("lazy", "hybrid", "dear", "lazy int8", "powersgd", "sparse", "sparse whole", "sparse corrected")
Wrong = Iterator[tuple[Any, ...]]
"""Of a loop that goes on afterwards, what it must not call, and the arguments."""


@dataclass(frozen=True)
class Refusal:
    loop: Callable[[EngineSettings], Wrong]
    sentence: str
    engines: tuple[str, ...] = ("lazy",)
    error: type[Exception] = ValueError
    abandons: bool = False
    """Whether a pool is closed in a step that never ends."""


REFUSALS: dict[str, Refusal] = {}


def refused(sentence: str, *engines: str, **more: Any) -> Callable[[Any], Any]:
    """Add a loop to those that `test_refused` runs under these engines on two ranks."""

    def add(loop: Callable[[EngineSettings], Wrong]) -> None:
        REFUSALS[loop.__name__.replace("_", " ")] = Refusal(loop, sentence, engines or ("lazy",), **more)

    return add


# What a pool and an engine are made of


def changed(change: Callable[[Any], object]) -> Layers:
    model = Layers()
    change(model)
    return model


class Sharded(nn.Parameter):
    """As torch's fully_shard makes them."""

    placements = ("Shard(0)",)


def made_of(sentence: str, *models: Callable[[], Any], **more: Any) -> Refusal:
    return Refusal(lambda settings: ((GradientPool, model(), settings) for model in models), sentence, **more)


NAMED = [*Layers().named_parameters()]
BAD_ENGINES = {
    r'awaits="each" sends one bucket after the other.*leave prioritized out': {"awaits": "each", "prioritized": True},
    r"PowerSGD's factors cannot be sent as int8; .*16 bits": {"wire": "int8", "powersgd_rank": 2},
    r'awaits is "reed"; give "each", "backward" or "read"': {"awaits": "reed"},
    r'wire is "torch.bfloat16"; give "fp32", "bf16", "fp16" or "int8"': {"wire": torch.bfloat16},
}


@pytest.mark.parametrize("sentence", BAD_ENGINES)
def test_an_engine_that_cannot_work_is_refused_where_it_is_declared(sentence: str):
    declared: dict[str, Any] = {"wire": "fp32", "awaits": "read"} | BAD_ENGINES[sentence]
    with pytest.raises(ValueError, match=sentence):
        Declaration(**declared, split_reduce_scatter=True)


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
    "a model wrapped in DDP": made_of(
        "DistributedDataParallel averages gradients itself; give the pool", lambda: DistributedDataParallel(Layers())
    ),
    "parameters that are shards": made_of(
        "weight is a DTensor, as fully_shard makes them",
        lambda: changed(lambda model: setattr(model.layer0, "weight", Sharded(model.layer0.weight.detach()))),
    ),
    "a parameter that is sparse": made_of(
        "layer0.weight is sparse, and a pool holds dense parameters; make it one by to_dense",
        lambda: changed(lambda model: setattr(model.layer0, "weight", nn.Parameter(torch.eye(8).to_sparse()))),
    ),
    "gradients of another dtype": made_of(
        r"weight is of torch.bfloat16 and its grad_dtype torch.float32; leave",
        lambda: changed(lambda model: setattr(model.bfloat16().layer0.weight, "grad_dtype", torch.float32)),
    ),
}  # fmt: skip


@refused(r"is no engine for a pool; give the settings of one, such as LazySync\(\)", error=TypeError)
def what_is_no_engine(_: EngineSettings) -> Wrong:
    return ((GradientPool, Layers(), given) for given in ("hybrid", LazySync, DdpSync(), None))


def test_one_parameter_given_twice_is_one():
    with closing(GradientPool([*NAMED, *NAMED], LazySync())) as pool:
        assert len(pool.slots) == len(NAMED)


def test_a_pool_without_the_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    for alone in ("", "0", "1"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        GradientPool(Layers(), LazySync()).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = r"WORLD_SIZE is 2, .*; call torch\.distributed\.init_process_group\(\) before"
    with pytest.raises(ValueError, match=told):
        GradientPool(Layers(), LazySync())


@pytest.mark.ci
@with_ranks(2, fresh=True)
def test_a_pool_made_before_the_ranks_met_is_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    del os.environ["WORLD_SIZE"]
    model, pool, _ = started(ENGINES["lazy"])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="this pool was made before the process group, so each of 2 ranks"):
        begin(model, pool, 0)


# Steps


Made = Callable[[Layers, GradientPool], tuple[Any, ...]]


def in_a_step(
    sentence: str, wrong: Made, engine: str = "lazy", kind: Callable[..., Any] = sgd,
    error: type[Exception] = ValueError,
) -> Refusal:  # fmt: skip
    """Between backward and step, which is taken afterwards."""

    def loop(settings: EngineSettings) -> Wrong:
        model, pool, optimizer = started(settings, kind)
        begin(model, pool, 0)
        yield wrong(model, pool)
        pool.step(optimizer)

    return Refusal(loop, sentence, (engine,), error)


def corrected(model: nn.Module) -> Any:
    return ours(model, momentum=0.9, corrected=True)


REFUSALS |= {
    "momentum that gradients have already": in_a_step(
        "the optimizer would add it again; give imagenet_fast's SGD corrected=True",
        lambda model, pool: (pool.step, ours(model, momentum=0.9)), "sparse corrected", corrected,
    ),
    "an optimizer of torch where a part is sent": in_a_step(
        "sends a part of the gradients, and optimizers of torch would apply the rest as well",
        lambda model, pool: (pool.step, sgd(model)), "sparse", ours,
    ),
    "an optimizer of another model": in_a_step(
        "none of this pool's parameters", lambda _, pool: (pool.step, sgd(Layers()))
    ),
    "the state of a model": in_a_step(
        r"is no state of a pool.*pool\.state_dict", lambda model, pool: (pool.load_state_dict, model.state_dict())
    ),
    "no optimizer": in_a_step("takes every optimizer of the step", lambda _, pool: (pool.step,)),
    "one optimizer twice": in_a_step(
        "every optimizer of the step, each once", lambda model, pool: (pool.step, *[sgd(model)] * 2)
    ),
}  # fmt: skip


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


@refused(r"layer\d\.\w+ .*create_graph=True.*torch\.autograd\.grad", "lazy", "hybrid", "sparse", error=RuntimeError)
def a_gradient_that_is_part_of_a_graph(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = trained(settings, 2, ours)
    pool.zero_grad()
    yield loss_of(model, 2).backward, None, None, True
    pool.drop()
    model.zero_grad()
    pool.zero_grad()
    (model.layer0.weight.grad,) = torch.autograd.grad(loss_of(model, 2), model.layer0.weight, create_graph=True)
    yield pool.step, optimizer
    pool.drop()
    train(model, pool, optimizer)


@refused(r"gradient of layer0\.weight is of the values before its last update; make each forward after .*settle\(\) "
         r"before .* torch\.func", "hybrid", "dear", error=RuntimeError)  # fmt: skip
def a_gradient_of_weights_before_their_update(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = trained(settings)
    pool.zero_grad()
    of_loss = torch.func.grad(lambda params: torch.func.functional_call(model, params, (images(3),)).sum())
    gradients = of_loss(dict(model.named_parameters()))
    yield setattr, model.layer0.weight, "grad", gradients["layer0.weight"].detach()
    pool.settle()
    for name, gradient in of_loss(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = gradient.detach()
    pool.step(optimizer)
    same_on_ranks(weights_of(model))


@refused("modified by an inplace operation", "lazy", "hybrid", "dear", error=RuntimeError)
def a_step_between_two_backwards_of_one_forward(settings: EngineSettings) -> Wrong:
    """In torch's own words."""
    model, pool, optimizer = trained(settings)
    pool.zero_grad()
    loss = loss_of(model, 4)
    loss.backward(retain_graph=True)
    pool.step(optimizer)
    pool.zero_grad()
    yield (loss.backward,)
    pool.drop()


@refused(r"0\.weight was converted after its gradient pool was made: .*; close\(\) the pool first", "lazy", "hybrid",
         error=RuntimeError)  # fmt: skip
def a_vocabulary_that_has_grown(settings: EngineSettings) -> Wrong:
    """Whether a rank has used the layer or not."""
    table = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    pool, optimizer = pooled(table, settings), sgd(table)
    for wrong in (lambda: table(torch.tensor([1, 6])).sum().backward(), pool.finish):
        pool.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        pool.step(optimizer)
        pool.zero_grad()
        before = table[0].weight.data
        table[0].weight.data = torch.cat([before, torch.ones(2, 3)])
        yield (wrong,)
        table[0].weight.data = before
        pool.drop()


@refused(r"0\.weight is sparse.*sparse=False", "lazy", "hybrid", "sparse", error=RuntimeError)
def a_gradient_that_is_sparse(settings: EngineSettings) -> Wrong:
    table = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    pool = pooled(table, settings)
    pool.zero_grad()
    yield (table(torch.tensor([1, 2])).sum().backward,)
    pool.drop()


@refused(r"an update of .* failed halfway, and its weights are of no step; go on from a checkpoint", "lazy", "hybrid",
         error=RuntimeError)  # fmt: skip
def an_update_that_failed(settings: EngineSettings) -> Wrong:
    """Under a deferring engine it fails in the next forward, and a loop that skips that batch would lose it."""
    model, pool, optimizer = started(settings)
    for step in range(3, 5):
        train(model, pool, optimizer)
        begin(model, pool, step)
        with patch.object(sys.modules["torch.optim.sgd"], "sgd", side_effect=MemoryError), pytest.raises(MemoryError):
            (pool.step(optimizer), loss_of(model, step))
        if step == 3:
            yield (pool.zero_grad,)
            pool.zero_grad()  # told once
    model.load_state_dict(Layers().state_dict())  # as from a checkpoint
    pool.zero_grad()


@refused(r"compiled autograd would compile; call backward outside of its context", "lazy", "hybrid", error=RuntimeError)
def compiled_autograd(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings)
    for full in (False, True):
        pool.zero_grad()
        with torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend="eager", fullgraph=full)):
            yield (loss_of(model, 0).backward,)
        pool.drop()
    train(model, pool, optimizer)


@refused(r"update of this model is pending; call pool\.settle\(\) in front of a function .* fullgraph=True", "hybrid",
         error=RuntimeError)  # fmt: skip
def a_whole_graph_of_model_and_loss(settings: EngineSettings) -> Wrong:
    model, pool, _ = trained(settings)
    pool.zero_grad()
    loss = torch.compile(lambda x: model(x).square().sum(), backend="eager", fullgraph=True)
    yield loss, images(3)
    pool.settle()
    loss(images(3)).backward()
    torch._dynamo.reset()
    pool.drop()


@refused(r"this pool is closed; make a new one", "lazy", "hybrid", "sparse", error=RuntimeError)
def a_pool_that_is_closed(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = trained(settings, 3, ours)
    pool.close()
    for call in (pool.zero_grad, pool.finish, partial(pool.step, optimizer), pool.drop, pool.state_dict):
        yield (call,)
    pool.settle()
    pool.close()
    train(model, pooled(model, settings), optimizer)


@refused(r"forked from the one with the pool's connections; train there, and only read the model here", "hybrid",
         "lazy", "dear", "sparse hybrid", error=RuntimeError, abandons=True)  # fmt: skip
def a_pool_of_another_process(settings: EngineSettings) -> Wrong:
    """What is forked, between steps or in one, reads what its parent reads, and ends; its parent trains on."""
    model, pool, optimizer = started(settings, ours)
    for number in range(8):
        begin(model, pool, number)
        if number % 2:
            pool.step(optimizer)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            with suppress(BaseException):
                loss = float(loss_of(model, 9))
                model.state_dict(), optimizer.state_dict()
                for call in (pool.zero_grad, loss_of(model, 9).backward, partial(pool.step, optimizer)):
                    with pytest.raises(RuntimeError, match="forked from the one"):
                        call()
                atexit._run_exitfuncs()
                os._exit(loss != float(loss_of(model, 9)))
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        if number % 2 == 0:
            pool.step(optimizer)
    same_on_ranks(weights_of(model))
    pool.zero_grad()
    pool.current.state = StepState.FORKED
    yield pool.step, optimizer


@refused("all ranks have sent this step's gradients|no step need be dropped|is over, and cannot be dropped",
         error=RuntimeError)  # fmt: skip
def a_drop_of_gradients_that_other_ranks_have(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings)
    for step in range(3):
        begin(model, pool, step)
        pool.end_backward()
        yield (pool.drop,)
        pool.finish()
        yield (pool.drop,)
        pool.step(optimizer)
        yield (pool.drop,)
    same_on_ranks(weights_of(model))


def uses(params: list[Any]) -> list[Callable[[], object]]:
    """What a user may do with gradients."""
    optimizer, scaler = torch.optim.SGD(params, lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return [
        lambda: nn.utils.clip_grad_norm_(params, 1.0), lambda: nn.utils.clip_grad_value_(params, 1.0), optimizer.step,
        lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer), lambda: params[0].grad.norm(),
        lambda: params[0].grad.mul_(2), lambda: params[0].grad / 2, lambda: params[0].grad.clone(),
        lambda: params[0].grad[0], lambda: params[0].grad.data, lambda: torch._foreach_norm([p.grad for p in params]),
    ]  # fmt: skip


@refused(r"on its way to the other ranks; call pool\.finish\(\)", "lazy", "hybrid", "dear", "sparse", "powersgd",
         error=RuntimeError)  # fmt: skip
def a_gradient_that_is_used_on_its_way(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings, ours)
    param = model.layer0.weight
    begin(model, pool, 0)
    for use in uses(list(model.parameters())):
        yield (use,)
    assert param.grad.shape == param.shape
    assert "on its way" in repr(param.grad)
    pool.step(optimizer)
    assert loops.alike(state(model), state(trained(settings, 1, ours)[0]))


@refused(r"layer0\.weight was replaced while .* call pool\.finish\(\)", "lazy", "hybrid", error=RuntimeError,
         abandons=True)  # fmt: skip
def a_gradient_that_is_replaced_on_its_way(settings: EngineSettings) -> Wrong:
    model, pool, _ = started(settings)
    begin(model, pool, 0)
    model.layer0.weight.grad = torch.ones(8, 8)
    yield (pool.finish,)


UNPOOLED: dict[str, Callable[[Layers], object]] = {
    "unfrozen layers": lambda model: model.requires_grad_(True),
    "a new head": lambda model: setattr(model, "layer4", nn.Linear(8, 8)),
    "assigned weights": lambda model: model.load_state_dict(state(model), assign=True),
    "a weight norm": lambda model: nn.utils.parametrizations.weight_norm(model.layer2),
}


def trained_after(change: Callable[[Layers], object]) -> Refusal:
    """Where only the optimizers know what is trained, and each gets its own step, ranks would part in silence."""

    def loop(settings: EngineSettings) -> Wrong:
        model = changed(lambda model: model.layer0.requires_grad_(False))
        pool = pooled(model, settings)
        train(model, pool, ours(model.layer1))
        change(model)
        for _ in range(2):
            yield (lambda: (begin(model, pool, 3), pool.end_backward()),)
        pool.drop()

    return Refusal(loop, r"is to be trained but is in no gradient pool.*freeze it", STATES, RuntimeError)


REFUSALS |= {name: trained_after(change) for name, change in UNPOOLED.items()}


@refused(r"SGD's param_groups\[0\]\['params'\]\[10\], of shape \(8,\), is to be trained but is in no gradient pool")
def a_parameter_of_the_loss(settings: EngineSettings) -> Wrong:
    model, pool, _ = started(settings)
    scale = nn.Parameter(torch.ones(8))
    pool.zero_grad()
    (scale * model(images(0))).sum().backward()
    yield pool.step, torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    pool.step(sgd(model))


@refused(r"a hook took the gradient of layer2\.weight away before it was averaged", error=RuntimeError)
def an_optimizer_that_steps_in_backward(settings: EngineSettings) -> Wrong:
    model = Layers()
    hook = model.layer2.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    pool = pooled(model, settings)
    pool.zero_grad()
    yield (loss_of(model, 0).backward,)
    pool.drop()
    hook.remove()
    train(model, pool, sgd(model))


@refused("DistributedDataParallel calls the model of this gradient pool", error=RuntimeError)
def a_wrapper_of_ddp_that_was_left(settings: EngineSettings) -> Wrong:
    """Both average: ranks would diverge, and by another amount in each run."""
    model = Layers()
    forward = DistributedDataParallel(model)
    pool = pooled(model, settings)
    pool.zero_grad()
    yield forward, images(0)
    train(model, pool, sgd(model))


@refused(r"is in another gradient pool; close\(\) that")
def a_second_pool_while_the_first_is_open(settings: EngineSettings) -> Wrong:
    model, first, _ = started(settings)
    yield GradientPool, model.layer1, settings
    first.close()
    GradientPool(model.layer1, settings).close()


# States


@refused("would lose this step's gradients; save after", "sparse", error=RuntimeError)
def a_save_between_finish_and_step(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings, ours)
    for step in range(3):
        pool.zero_grad()
        pool.state_dict()
        loss_of(model, step).backward()
        pool.finish()
        model.layer0.weight.grad.detach_()
        yield (pool.state_dict,)
        pool.step(optimizer)
        pool.state_dict()


@unmeasured()
def kept(settings: EngineSettings) -> dict[str, Any]:
    """By a pool, after some steps."""
    corrected = settings.velocity_momentum is not None
    kind = partial(ours, momentum=0.9, corrected=corrected)
    return copy.deepcopy(trained(settings, 6, kind)[1].state_dict())  # as many as engines learn from


@refused(r"state is of another engine than .*; take that engine", *STATES)
def a_state_of_another_engine(settings: EngineSettings) -> Wrong:
    state = kept(settings)
    for other in map(ENGINES.__getitem__, STATES):
        pool = pooled(Layers(), other)
        if (settings.kind == "sparse") == (other.kind == "sparse"):
            pool.load_state_dict(copy.deepcopy(state))
        else:
            yield pool.load_state_dict, state
        pool.close()


@refused(r"gradients of this step are on their way.*pool\.step", "lazy", "hybrid", error=RuntimeError)
def a_state_loaded_in_the_middle_of_a_step(settings: EngineSettings) -> Wrong:
    model, pool, optimizer = started(settings)
    saved = pool.state_dict()
    begin(model, pool, 0)
    yield pool.load_state_dict, saved
    pool.step(optimizer)
    saved = copy.deepcopy(pool.state_dict())
    train(model, pool, optimizer, range(1, 2))
    pool.load_state_dict(saved)  # after what was put off
    train(model, pool, optimizer, range(2, 4))
    same_on_ranks(weights_of(model))


@pytest.mark.parametrize("engine", ["lazy", "hybrid", "lazy int8", "sparse", "powersgd"])
def test_a_residual_of_other_ranks_is_refused(engine: str):
    """One rank's file has one rank's residual: the others' would be lost, and its own counted too much."""
    state, _ = run(2, kept, ENGINES[engine])
    pool = pooled(Layers(), ENGINES[engine])
    if engine in ("lazy", "hybrid"):
        pool.load_state_dict(state)
    else:
        with pytest.raises(ValueError, match="did not send, and here are 1; go on with 2, or merge"):
            pool.load_state_dict(state)
    pool.close()


@refused(r"auto had chosen .* take auto")
def a_state_of_auto_after_its_choice(settings: EngineSettings) -> Wrong:
    state = copy.deepcopy(trained(ENGINES["auto"], 9)[1].state_dict())
    assert state["engine"]["elected"]
    yield pooled(Layers(), settings).load_state_dict, state


@refused(r"auto had chosen butterflies.*take auto with the settings that it had")
def a_choice_that_auto_no_longer_has(_: EngineSettings) -> Wrong:
    state = copy.deepcopy(trained(ENGINES["auto"], 9)[1].state_dict())
    yield pooled(Layers(), ENGINES["auto"]).load_state_dict, state | {"engine": {"elected": "butterflies"}}


FIRST = [(name, refusal.engines[0]) for name, refusal in REFUSALS.items() if name not in [*UNPOOLED][1:]]
EVERY = [(name, engine) for name, refusal in REFUSALS.items() for engine in refusal.engines]


@pytest.mark.parametrize(("name", "engine"), tiers(FIRST, EVERY))
def test_refused(name: str, engine: str):
    run(2, _refused, name, engine, fresh=REFUSALS[name].abandons)


@unmeasured()
def _refused(name: str, engine: str) -> None:
    refusal, told = REFUSALS[name], torch.tensor(0)
    for wrong, *arguments in refusal.loop(ENGINES[engine]):
        with pytest.raises(refusal.error, match=refusal.sentence):
            wrong(*arguments)
        told += 1
    dist.all_reduce(told)
    assert told > 0


# What looks odd and can be done


def test_a_model_whose_engine_could_not_be_built_is_free_for_another():
    model = nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError):
        attach(model, Declaration("fp32", "backward", 1e6, group_key=lambda slot: 1 // 0))
    _, sync = attach(model, LazySync(wire="fp32"))
    sync.close()


@with_ranks(2)
@unmeasured()
def test_the_state_of_auto_is_loaded_before_and_after_its_choice() -> None:
    model, pool, optimizer = trained(ENGINES["auto"], 9)
    saved, weights = copy.deepcopy(pool.state_dict()), state(model)
    momenta, ends = copy.deepcopy(optimizer.state_dict()), []
    train(model, pool, optimizer)
    for again, loaded, other in (started(ENGINES["auto"]), (model, pool, optimizer)):
        again.load_state_dict(weights)
        other.load_state_dict(copy.deepcopy(momenta))
        loaded.load_state_dict(copy.deepcopy(saved))
        train(again, loaded, other)
        loaded.settle()
        ends.append(weights_of(again))
    assert torch.equal(*ends)


PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from imagenet_fast.sync.comm_stream import CommOp, CommStream
from tests.sync.test_refusals import ENGINES, trained

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
model, pool, optimizer = trained(ENGINES["hybrid"], 4)
values, stream = torch.ones(1000), CommStream(torch.device("cpu"), (0, 1))
if sys.argv[2] == "0":
    time.sleep(1)
stream.submit(CommOp(stream, lambda: stream.all_reduce(values)))
"""
CLOSED_LATE = "dist.destroy_process_group(); pool.close()"


@pytest.mark.ci
@pytest.mark.parametrize("end", ["", CLOSED_LATE], ids=["never closed", "closed after the group"])
def test_ranks_end_well_whatever_becomes_of_their_pools(end: str):
    """An abort of the first to end, with phases in flight, would make torchrun kill the others, which may be saving."""
    with free_port() as port:
        command = [sys.executable, "-c", PROGRAM + end, str(port)]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        for rank in ranks:
            _, told = rank.communicate(timeout=120)
            assert (rank.returncode, "Traceback" in told) == (0, False), told
