"""What users get wrong without a sign of it: pools made too early, shared scalers, updates that fail, gradients cut."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import (
    DdpSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    PowerSgdSync,
    SparseSync,
    build_engine,
)
from imagenet_fast.training.optimizers import LARS, SGD
from tests.ports import free_port
from tests.ranks import run
from tests.sync.loops import pooled
from tests.sync.test_slips import images, loss_of, network, weights

PART = SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0)
LAZY, HYBRID = LazySync(wire="fp32"), HybridSync(wire="fp32")


def take_steps(model: nn.Module, pool: GradientPool, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)


def clipped(kind: type[torch.optim.Optimizer], by_pool: bool) -> tuple[Tensor, list[Tensor]]:
    """Weights after steps with a clipped norm, and all norms."""
    model = network()
    pool, norms = pooled(model, PART), []
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(6):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.finish()
        pool.finish()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        pool.step(optimizer) if by_pool else optimizer.step()
    pool.close()
    return weights(model), norms


def _clip() -> list[Any]:
    return [clipped(*case) for case in ((SGD, True), (torch.optim.AdamW, False))]


def test_ranks_clip_alike_what_sparse_has_sent():
    """Each rank has a residual of its own, which must not be in ``p.grad``."""
    for (ours, norms), (theirs, others) in zip(*run(2, _clip), strict=True):
        assert torch.equal(ours, theirs)
        assert norms == others
        assert min(norms) > 0


def _sent_gradients() -> tuple[Tensor, Tensor]:
    model = network()
    pool = pooled(model, PART)
    pool.zero_grad()
    loss_of(model, 0).backward()
    before = torch.cat([slot.param.grad is not None and pool.buffer[slot.start : slot.flag] for slot in pool.slots])
    pool.finish()
    shown = torch.cat([slot.param.grad.flatten() for slot in pool.slots])
    sent = pool.reducer.engine.sent_slices()
    assert sent is not None
    for slot in pool.slots:
        for part in sent.get(slot.param, ()):
            slot.param.grad.view(-1)[part] = 0
    assert not any(slot.param.grad.any() for slot in pool.slots), "what was not sent is zero"
    pool.step(SGD(model.parameters(), lr=0.1))
    pool.close()
    return before, shown


def test_gradients_of_sparse_are_the_means_of_what_was_sent():
    (before, shown), (theirs, others) = run(2, _sent_gradients)
    assert torch.equal(shown, others)
    there = shown != 0
    assert 0.2 < there.float().mean() < 0.8
    torch.testing.assert_close(shown[there], (before + theirs)[there] / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sparse_takes_every_dtype(dtype: torch.dtype):
    run(2, _of_dtype, dtype)


def _of_dtype(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    pool, optimizer = pooled(model, PART), SGD(model.parameters(), lr=0.1)
    for step in range(4):
        pool.zero_grad()
        model(images(step).to(dtype)).square().mean().backward()
        pool.step(optimizer)
    pool.close()
    assert weights(model).isfinite().all()


@pytest.mark.parametrize(
    "optimizer_of",
    [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: LARS(p, lr=0.1, momentum=0.9)],
    ids=["sgd", "lars"],
)
def test_momentum_is_not_added_twice(optimizer_of: Callable[[Any], torch.optim.Optimizer]):
    model = network()
    pool = pooled(model, PART.model_copy(update={"momentum_correction": True}).derived(0, 0.9))
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="the optimizer would add it again; give imagenet_fast's SGD corrected=True"):
        pool.step(optimizer_of(model.parameters()))
    pool.step(SGD(model.parameters(), lr=0.1, momentum=0.9, corrected=True))
    pool.close()


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "two optimizers"])
def test_two_pools_do_not_update_one_scaler_in_turns(shared: bool):
    models = network(), network()
    pools = [pooled(model, LAZY) for model in models]
    everything = [*models[0].parameters(), *models[1].parameters()]
    if shared:
        optimizers = [torch.optim.SGD(everything, 0.1)] * 2
    else:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for pool in pools:
        pool.zero_grad()
    scaler.scale(loss_of(models[0], 0) + loss_of(models[1], 0)).backward()
    for pool in pools:
        pool.finish()
    pools[0].step(optimizers[0], scaler)
    with pytest.raises(ValueError, match="another pool has updated this scaler since the backward"):
        pools[1].step(optimizers[1], scaler)
    pools[1].zero_grad()
    scaler.scale(loss_of(models[1], 1)).backward()
    if not shared:
        pools[1].step(optimizers[1], scaler)  # after a backward of its own
    for pool in pools:
        pool.close()


def test_a_disabled_scaler_has_no_scale_to_lose():
    models = network(), network()
    pools, scaler = [pooled(model, LAZY) for model in models], torch.amp.GradScaler("cpu", enabled=False)
    for pool in pools:
        pool.zero_grad()
    (loss_of(models[0], 0) + loss_of(models[1], 0)).backward()
    for model, pool in zip(models, pools, strict=True):
        pool.step(torch.optim.SGD(model.parameters(), 0.1), scaler)
        pool.close()


def test_a_pool_without_the_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    for alone in ("", "0", "1"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        GradientPool(network()).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"WORLD_SIZE is 2, .*; call torch\.distributed\.init_process_group\(\) before"
    ):
        GradientPool(network())


PROGRAM = """
import sys, time
import torch.distributed as dist
from tests.sync.test_misuse import *

def meet():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
"""
TOO_EARLY = """
model = network()
pool = pooled(model, LAZY)
meet()
loss_of(model, 0).backward()
"""
FORGOTTEN = """
meet()
model = network()
pool, optimizer = pooled(model, HYBRID), torch.optim.SGD(model.parameters(), 0.1)
take_steps(model, pool, optimizer, 4)
if sys.argv[2] == "0":
    time.sleep(1)
"""
CLOSED_LATE = """
dist.destroy_process_group()
pool.close()
"""


def two_programs(body: str) -> list[tuple[int, str]]:
    """The exit codes and errors of two ranks that no launcher has started."""
    with free_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM + body, str(port), str(rank)], stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, told) for rank, told in zip(ranks, errors, strict=True)]


def test_a_pool_made_before_the_ranks_met_is_refused():
    for code, told in two_programs(TOO_EARLY):
        assert code == 1
        assert "this pool was made before the process group, so each of 2 ranks" in told


@pytest.mark.parametrize("end", ["", CLOSED_LATE], ids=["never closed", "closed after the group"])
def test_ranks_end_well_whatever_becomes_of_their_pools(end: str):
    """An abort of the first to end would make torchrun kill the others, which may be saving."""
    for code, told in two_programs(FORGOTTEN + end):
        assert (code, "Traceback" in told) == (0, False), told


def test_an_update_that_failed_is_not_passed_over(monkeypatch: pytest.MonkeyPatch):
    """Under a deferring engine it fails in the next forward, and a loop that skips that batch would lose it."""
    model = network()
    pool, optimizer = pooled(model, HYBRID), torch.optim.SGD(model.parameters(), 0.1)
    take_steps(model, pool, optimizer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", _no_memory)
        with pytest.raises(MemoryError):
            loss_of(model, 3)
    told = r"an update of .* failed halfway, and its weights are of no step; go on from a checkpoint"
    with pytest.raises(RuntimeError, match=told):
        pool.zero_grad()
    pool.zero_grad()  # told once
    loss_of(model, 3).backward()
    pool.step(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", _no_memory)
        with pytest.raises(MemoryError):
            loss_of(model, 4)
    model.load_state_dict(network().state_dict())  # as from a checkpoint
    pool.zero_grad()
    pool.close()


def test_a_frozen_layer_with_an_old_gradient_is_named_so():
    model = network()
    loss_of(model, 0).backward()
    model[0].requires_grad_(False)
    pool = pooled(model, LAZY)
    with pytest.raises(ValueError, match=r"is frozen and has an old gradient, which would be applied; set its \.grad"):
        pool.step(torch.optim.SGD(model.parameters(), 0.1))
    for param in model[0].parameters():
        param.grad = None
    loss_of(model, 1).backward()
    pool.step(torch.optim.SGD(model.parameters(), 0.1))
    pool.close()


@pytest.mark.parametrize("given", ["hybrid", LazySync, DdpSync(), None])
def test_what_is_no_engine_is_refused(given: Any):
    pool = GradientPool(network())
    with pytest.raises(TypeError, match=r"is no engine for a pool; give the settings of one, such as LazySync\(\)"):
        build_engine(given, pool)
    with pytest.raises(TypeError, match=r"give pool.attach what build_engine\(settings, pool\) returns"):
        pool.attach(given)
    pool.close()


def test_a_model_of_two_dtypes_is_told_which():
    model = network()
    model[2].double()
    with pytest.raises(ValueError, match=r"\d\.\w+ is of torch.float\d\d on cpu beside torch.float\d\d on cpu; make a"):
        GradientPool(model)


@pytest.mark.parametrize("how", ["list", "compiled", "compiled, by name"])
def test_ranks_that_fail_before_and_in_backward_stay_in_step(how: str):
    """Also where the pool's model is not called itself."""
    assert torch.equal(*run(2, _fails_apart, how))


def _fails_apart(how: str) -> Tensor:
    inner = network()
    if how == "list":
        model, forward = nn.ModuleList([inner]), inner
    else:
        model = forward = torch.compile(inner, backend="eager")
    pool = GradientPool(inner.named_parameters(), model=model) if "name" in how else GradientPool(model)
    pool.attach(build_engine(LAZY, pool))
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    for step in range(4):
        pool.zero_grad()
        loss = forward(images(step)).square().mean()
        if step == 2:
            if dist.get_rank() == 1:
                hook = inner[2].weight.register_hook(_no_memory)
                with pytest.raises(MemoryError):
                    loss.backward()
                hook.remove()
            continue
        loss.backward()
        pool.step(optimizer)
    pool.close()
    assert weights(inner).isfinite().all()
    return weights(inner)


@pytest.mark.parametrize("settings", [LAZY, HYBRID])
@pytest.mark.parametrize("at", ["at first", "later"])
def test_a_step_that_one_rank_never_began_is_dropped_by_all(settings: EngineSettings, at: str):
    """Say for a bad image: no forward has run there that the pool could have seen."""
    for zeroes in (False, True):
        ours, theirs = run(2, _never_began, settings, 0 if at == "at first" else 2, zeroes)
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1] == 3, "steps"


def _never_began(settings: EngineSettings, missing: int, zeroes: bool) -> tuple[Tensor, int]:
    model, taken = network(), 0
    pool, optimizer = pooled(model, settings), torch.optim.SGD(model.parameters(), 0.1)
    pool.guard(3e38)
    for step in range(4):
        if zeroes:
            pool.zero_grad()
        if step == missing and dist.get_rank() == 1:
            pool.zero_grad(drop=True)
            continue
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.finish()
        assert pool.found_inf is not None
        if pool.found_inf:
            assert step == missing
            continue
        pool.step(optimizer)
        taken += 1
    pool.close()
    assert weights(model).isfinite().all()
    return weights(model), taken


def _drop_after_finish() -> Tensor:
    model = network()
    pool, optimizer = pooled(model, LAZY), torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.finish()
        if step == 1 and dist.get_rank() == 1:
            with pytest.raises(
                RuntimeError, match="cannot drop this step: the other ranks have its gradients and apply"
            ):
                pool.zero_grad(drop=True)
        pool.step(optimizer)
    pool.close()
    return weights(model)


def test_a_step_whose_gradients_other_ranks_have_cannot_be_dropped():
    """As of an exception between finish and step on one rank, say in clipping: ranks would end with other weights."""
    ours, theirs = run(2, _drop_after_finish)
    assert torch.equal(ours, theirs)


def _update_alone(settings: EngineSettings) -> Tensor:
    model = network()
    pool = pooled(model, settings)
    for step in range(3):
        pool.zero_grad()
        loss_of(model, step + dist.get_rank()).backward()
        pool.update(lambda params: [param.data.sub_(0.1 * param.grad) for param in params])
    pool.settle()
    pool.close()
    return weights(model)


@pytest.mark.parametrize("settings", [LAZY, HYBRID])
def test_an_update_ends_the_backward_itself(settings: EngineSettings):
    """Without ``end_backward`` before it, ranks applied gradients of their own."""
    ours, theirs = run(2, _update_alone, settings)
    assert torch.equal(ours, theirs)


def test_a_save_between_finish_and_step_is_refused_where_it_would_lose_gradients():
    model = network()
    pool, optimizer = pooled(model, PART), SGD(model.parameters(), 0.1)
    for step in range(3):
        pool.zero_grad()
        pool.state_dict()
        loss_of(model, step).backward()
        pool.finish()
        with pytest.raises(RuntimeError, match="would lose this step's gradients; save after"):
            pool.state_dict()
        pool.step(optimizer)
        pool.state_dict()
    pool.close()


def _residual(settings: EngineSettings) -> dict[str, Any]:
    model = network()
    pool, optimizer = pooled(model, settings), SGD(model.parameters(), 0.1)
    take_steps(model, pool, optimizer, 3)
    state = pool.state_dict()
    pool.load_state_dict(state)
    pool.close()
    return state


@pytest.mark.parametrize("settings", [LAZY, PART, LazySync(wire="int8"), PowerSgdSync(dense_epochs=0)])
def test_a_residual_of_other_ranks_is_refused(settings: EngineSettings):
    """One rank's file has one rank's residual: the others' would be lost, and its own counted too much."""
    state, _ = run(2, _residual, settings)
    pool = pooled(network(), settings)
    if settings == LAZY:
        pool.load_state_dict(state)
    else:
        with pytest.raises(ValueError, match="did not send, and here are 1; go on with 2, or merge"):
            pool.load_state_dict(state)
    pool.close()


def test_a_disabled_scaler_is_none():
    """AMP templates make one for every dtype; with it sparse would refuse, and hybrid update at once."""
    for settings in (PART, HYBRID):
        model = network()
        pool, optimizer = pooled(model, settings), SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            pool.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            pool.step(optimizer, scaler)
        if settings is HYBRID:
            assert pool.reducer.deferral is not None
            assert pool.reducer.deferral.waits(pool.slots[0])
        pool.close()


class Sharded(nn.Parameter):
    """As torch's fully_shard makes them."""

    placements = ("Shard(0)",)


def test_parameters_that_are_shards_or_have_gradients_of_another_dtype_are_refused():
    model = network()
    model[0].weight = Sharded(model[0].weight.detach())
    with pytest.raises(ValueError, match="weight is a DTensor, as fully_shard makes them"):
        GradientPool(model)
    model = network().to(torch.bfloat16)
    model[0].weight.grad_dtype = torch.float32
    with pytest.raises(ValueError, match=r"weight is of torch.bfloat16 and its grad_dtype torch.float32; leave"):
        GradientPool(model)


def test_a_pool_without_an_engine_has_no_state():
    pool = GradientPool(network())
    for ask in (pool.state_dict, lambda: pool.load_state_dict({})):
        with pytest.raises(AssertionError, match="attach an engine before"):
            ask()


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("as if there were no memory left")


def _resharded(settings: EngineSettings) -> None:
    model = network()
    pool = pooled(model, settings)
    take_steps(model, pool, torch.optim.SGD(model.parameters(), 0.1), 3)
    state = copy.deepcopy(pool.state_dict())
    pool.close()
    assert state["engine"]["memory"]
    for own in state["engine"]["memory"].values():  # as of layers twice as large, of which this is a shard now
        own["error"] = own["error"].repeat(2, 1)
    pool = pooled(model, settings)
    pool.load_state_dict(state)
    take_steps(model, pool, torch.optim.SGD(model.parameters(), 0.1), 3)
    pool.close()
    assert weights(model).isfinite().all()


def test_powersgd_goes_on_with_shards_of_another_size():
    run(2, _resharded, PowerSgdSync(rank=1, dense_epochs=0))
