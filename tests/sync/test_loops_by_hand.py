"""Loops of users that programs (``tests/sync/programs``) have no words for: right, or refused in words."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from imagenet_fast.sync import EngineSettings, GradientPool, build_engine
from imagenet_fast.sync.per_param_step import snapshot_step
from imagenet_fast.sync.reshard_state import reshard_sync_state
from imagenet_fast.training.optimizers import SGD
from tests.ranks import lending, run
from tests.sync import fuzz_loops
from tests.sync.loops import (
    DEAR,
    DEFERRING,
    DENSE,
    HYBRID,
    LAZY,
    Layers,
    alike,
    backward,
    end_step,
    images,
    loss_of,
    sgd,
    state,
    take_step,
    trained,
    unmeasured,
)  # fmt: skip

SPARSE = fuzz_loops.SPARSE["sparse"]
ENGINES = pytest.mark.parametrize("settings", [HYBRID, DEAR, LAZY], ids=["hybrid", "dear", "lazy"])
DEFERRED = pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])


@contextmanager
def pool_of(model: nn.Module, settings: EngineSettings) -> Iterator[GradientPool]:
    with closing(GradientPool(model, topology=lending() if dist.is_initialized() else None)) as pool:
        pool.attach(build_engine(settings, pool))
        yield pool


def take_steps(pool: GradientPool, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)


# Failures


@pytest.mark.parametrize("settings", [HYBRID, LAZY, DENSE], ids=["hybrid", "lazy", "sparse whole"])
def test_nobody_overlooks_a_backward_that_fails_on_one_rank(settings: EngineSettings):
    for weights in run(2, _failing_on_rank_1, settings, 2, 2):
        assert all(weights[f"layer{layer}.weight"].isnan().all() for layer in (0, 1, 2))


def _failing_on_rank_1(settings: EngineSettings, layer: int, fails: int) -> dict[str, Tensor]:
    """Weights after a step in which that layer's backward fails there, and one more."""
    model = Layers()
    ours = settings is not DENSE and settings.keeps
    optimizer = SGD(model.parameters(), 0.01, weight_decay=1e-4) if ours else sgd(model)
    with pool_of(model, settings) as pool:
        for step in range(fails + 2):
            if backward(model, pool, step, layer if step == fails and dist.get_rank() == 1 else None):
                pool.step(optimizer) if ours else take_step(pool, optimizer, settings)
    return state(model)


@pytest.mark.parametrize(("layer", "fails"), [*((layer, 3) for layer in range(5)), *((0, step) for step in (4, 8, 14))])
@pytest.mark.parametrize("world", [2, 3])
def test_nobody_overlooks_it_under_sparse_either(world: int, layer: int, fails: int):
    """Even if all chunks that this step sends were complete, and on their way, when a backward failed on one rank.

    A chunk of padding alone says nothing, but changes nothing either.
    """
    first, *others = run(world, _failing_on_rank_1, FEW_CHUNKS, layer, fails)
    seen = torch.cat([weights.flatten() for weights in first.values()]).isnan().any()
    for other in others:
        assert seen == torch.cat([weights.flatten() for weights in other.values()]).isnan().any(), "all ranks see it"
        assert seen or alike(first, other), "or none needs to"
    assert seen or layer == 0, "mostly there is something to see"


FEW_CHUNKS = SPARSE.model_copy(update={"sparsity": 0.8, "chunk": 16})


class UsersError(Exception):
    pass


def test_a_failing_close_is_a_note_on_the_users_exception():
    model = Layers()
    pool = GradientPool(model)
    pool.attach(build_engine(HYBRID, pool))
    optimizer = sgd(model)

    def failing_update(params: list[nn.Parameter]) -> None:
        raise MemoryError("no memory for the update")

    for step in range(3):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.end_backward()
        pool.update(failing_update if step == 2 else lambda params: optimizer.step())

    def fails() -> None:
        with closing(pool):
            raise UsersError

    with pytest.raises(UsersError) as raised:
        fails()
    assert any("no memory for the update" in note for note in raised.value.__notes__)
    assert not any(module._forward_pre_hooks for module in model.modules()), "the model is left to others"


# Loss scales of residuals


@pytest.mark.parametrize("engine", ["lazy int8", "hybrid int8", "powersgd", "sparse", "sparse corrected"])
def test_a_changed_loss_scale_changes_no_residual(engine: str):
    """Powers of two: with and without a scale nearly the same comes out."""
    check_scales(fuzz_loops.ENGINES[engine], [1.0, 4.0, 4.0, 0.25, 0.25, 1024.0, 2.0], False)


def test_a_loss_scale_under_sparse_unscales_what_was_sent_alone():
    """What has yet to be sent is no gradient of this step, and stays in scaled units."""
    check_scales(SPARSE, [1024.0] * 8, True)


def check_scales(settings: EngineSettings, scales: list[float], by_optimizer: bool) -> None:
    expected, found = (run(2, _scaled, settings, s, by_optimizer)[0] for s in ([1.0] * len(scales), scales))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def _scaled(settings: EngineSettings, scales: list[float], by_optimizer: bool) -> dict[str, Tensor]:
    """Weights after steps with these loss scales, of which the optimizer knows, or its rate, and the pool."""
    scale = torch.ones(())

    def rescale(pool: Any, _: object, optimizer: Any, step: int) -> None:
        scale.fill_(scales[step])
        if by_optimizer:
            optimizer.grad_scale = scale
            return
        optimizer.param_groups[0]["lr"] = 0.02 / scales[step]
        if step == 0:
            pool.set_loss_scale(scale)

    corrected = settings.velocity_momentum is not None
    return trained(
        settings, loss=lambda model, step: scales[step] * loss_of(model, step), before=rescale,
        optimizer_of=lambda model: SGD(model.parameters(), 0.02, corrected=corrected), steps=len(scales),
    )  # fmt: skip


def test_the_residuals_loss_scale_goes_to_another_number_of_ranks():
    model = Layers()
    with pool_of(model, SPARSE) as pool:
        pool.set_loss_scale(torch.tensor(8.0))
        pool.zero_grad()
        loss_of(model, 0).backward()
        pool.end_backward()
        states = [pool.state_dict()] * 2
    assert reshard_sync_state(states)["loss_scale"] == 8.0


# Updates that are deferred


@DEFERRED
def test_layers_are_updated_one_by_one_as_a_forward_gets_there(settings: EngineSettings):
    """Also where a model asks ``next(self.parameters()).dtype``."""
    for begun, first, middle, last in run(2, _updated_in_forward, settings):
        assert begun <= 1
        assert first <= 1, "that of the parameter that forward asks for its dtype"
        assert 2 < middle < 10
        assert last == 10, "our hooks go before a module's others"


def _updated_in_forward(settings: EngineSettings) -> list[int]:
    """How many parameters are up to date before a forward asks, after it, at the third layer, and at the last."""
    updated: list[list[nn.Parameter]] = []
    seen: list[int] = []

    class Asking(Layers):
        def forward(self, x: Tensor) -> Tensor:
            see()
            x = x.to(next(self.parameters()).dtype)
            see()
            return super().forward(x)

    def see(*_: object) -> None:
        seen.append(sum(map(len, updated)))

    model = Asking()
    with pool_of(model, settings) as pool:
        for layer in (model.layer2, model.layer4):
            layer.register_forward_pre_hook(see)
        take_recorded_steps(pool, sgd(model), updated, lambda: loss_of(model, 0))
        seen.clear()
        loss_of(model, 8)
    return seen


def take_recorded_steps(pool: GradientPool, optimizer: Any, updated: list[Any], loss: Callable[[], Tensor]) -> None:
    """More than are watched; ``updated``: the parameters that calls for the last one have updated."""

    def update(params: list[nn.Parameter], elements: object = None) -> None:
        updated.append(params)
        apply(params)

    for _ in range(8):
        pool.zero_grad()
        loss().backward()
        updated.clear()
        apply = snapshot_step(optimizer)
        pool.end_backward()
        pool.update(update)


FUSED = [HYBRID.model_copy(update={"fuse_mb": 1}), DEAR.model_copy(update={"bucket_mb": 1})]


@pytest.mark.parametrize("settings", FUSED, ids=["hybrid", "dear"])
def test_what_came_together_is_updated_together(settings: EngineSettings):
    """Of 107 modules one by one, launches alone cost ResNet-50 8 times what one update of all costs."""
    for sizes in run(2, _updates_of_a_message, settings):
        assert sum(sizes) == 40
        assert len(sizes) <= 2, "one message, but for what a plan wants first"


def _updates_of_a_message(settings: EngineSettings) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(20)))
    updated: list[list[nn.Parameter]] = []
    with pool_of(model, settings) as pool:
        ones = torch.ones(1, 1, 2, 2)
        take_recorded_steps(pool, SGD(model.parameters(), 0.1), updated, lambda: model(ones).sum())
        model(ones)
    return list(map(len, updated))


@DEFERRED
def test_reading_a_parameter_too_early_is_an_error_and_not_a_wrong_result(settings: EngineSettings):
    run(2, _read_too_early, settings)


def _read_too_early(settings: EngineSettings) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pool_of(model, settings) as pool:
        optimizer = sgd(model)
        for _ in range(7):
            pool.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            pool.step(optimizer)
        pool.zero_grad()
        with pytest.raises(RuntimeError, match=r"was read before its update.*settle"):
            F.linear(torch.ones(1, 4), model[1].weight, model[1].bias).sum().backward()
        pool.zero_grad()


def test_methods_that_a_user_had_set_are_called_and_put_back():
    model = Layers()
    calls: list[str] = []

    def disabled_train(mode: bool = True) -> nn.Module:
        calls.append("train")
        return model.layer0

    model.layer0.train = disabled_train  # type: ignore[method-assign]
    with pool_of(model, HYBRID):
        model.train()
    assert calls == ["train"]
    assert model.layer0.train is disabled_train
    assert "train" not in vars(model)
    assert "parameters" not in vars(model)


def test_the_pool_learns_in_which_order_gradients_come():
    at_first, later = run(2, _orders)[0]
    assert at_first == ["layer2", "layer1", "layer4", "layer0", "layer3"]
    assert later == ["layer4", "layer3", "layer2", "layer1", "layer0"]


def _orders() -> list[list[str]]:
    model, orders = Layers((3, 0, 4, 1, 2)), []
    with pool_of(model, LAZY) as pool:
        for _ in range(2):
            orders.append(list(dict.fromkeys(slot.layer for slot in pool.slots)))
            take_steps(pool, model, sgd(model), 2)
    return orders


# Pools that nobody closes


@pytest.mark.parametrize("engine", ["lazy", "lazy int8", "ring", "hybrid", "dear", "sparse", "auto"])
def test_a_pool_that_nobody_closes_is_freed_with_its_model(engine: str):
    assert run(2, _left_without_close, engine) == [True, True]


def _left_without_close(engine: str) -> bool:
    """Whether the model goes when everything that a user had of it is gone."""
    with unmeasured():
        model = Layers()
        pool = GradientPool(model, topology=lending())
        pool.attach(build_engine(fuzz_loops.ENGINES[engine], pool))
        optimizer = SGD(model.parameters(), 0.1)
        take_steps(pool, model, optimizer, 2)
        pool.settle()
        known = weakref.ref(model)
        del model, pool, optimizer
        until = time.monotonic() + 10
        while gc.collect() >= 0 and known() is not None and time.monotonic() < until:
            time.sleep(0.01)  # sparse's thread may still send what chooses the next chunks
        return known() is None


def test_an_optimizer_outlives_its_pools_without_them():
    assert run(2, _outlives) == [[None] * 3] * 2


def _outlives() -> list[object]:
    model = Layers()
    optimizer, seen = sgd(model), []
    for _ in range(3):
        with pool_of(model, DEAR) as pool:
            seen.append(weakref.ref(pool))
            take_steps(pool, model, optimizer, 2)
        del pool
    gc.collect()
    assert optimizer.state_dict()["param_groups"]
    return [ref() for ref in seen]


# Two models


@pytest.mark.parametrize("guarded", [False, True], ids=["", "under no_sync"])
@ENGINES
def test_dcgan_trains_as_by_hand(settings: EngineSettings, guarded: bool):
    """PyTorch's tutorial: the generator's backward goes through the discriminator, whose next step forgets it."""
    expected, found = run(2, _dcgan, None, guarded), run(2, _dcgan, settings, guarded)
    assert all(alike(*results) for results in zip(expected, found, strict=True))


def _dcgan(settings: EngineSettings | None, guarded: bool) -> dict[str, Tensor]:
    maker = Layers()
    critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (critic, maker)]
    pools: list[GradientPool] = []
    for model in (critic, maker) if settings is not None else ():
        pools.append(GradientPool(model))
        pools[-1].attach(build_engine(settings, pools[-1]))
    for number in range(5):
        (pools or optimizers)[0].zero_grad()
        with pools[0].no_sync() if pools else nullcontext():
            critic(images(number)).mean().backward()
        fake = maker(images(100 + number))
        critic(fake.detach()).square().mean().backward()
        end_step(pools[0] if pools else None, critic, optimizers[0])
        (pools or optimizers)[1].zero_grad()
        with pools[0].no_sync() if pools and guarded else nullcontext():
            (-critic(fake).mean()).backward()
        end_step(pools[1] if pools else None, maker, optimizers[1])
    for pool in pools:
        pool.close()
    return state(maker) | {f"critic.{name}": value for name, value in state(critic).items()}


# What is refused


def uses(params: list[Any], optimizer: torch.optim.Optimizer) -> list[Callable[[], object]]:
    """What a user may do with gradients."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return [
        lambda: nn.utils.clip_grad_norm_(params, 1.0), lambda: nn.utils.clip_grad_value_(params, 1.0), optimizer.step,
        lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer), lambda: params[0].grad.norm(),
        lambda: params[0].grad.mul_(2), lambda: params[0].grad / 2, lambda: params[0].grad.clone(),
        lambda: params[0].grad[0], lambda: params[0].grad.data, lambda: torch._foreach_norm([p.grad for p in params]),
    ]  # fmt: skip


@ENGINES
def test_using_a_gradient_on_its_way_is_refused_in_words(settings: EngineSettings):
    run(2, _used_on_its_way, settings, fresh=True)


def _used_on_its_way(settings: EngineSettings) -> None:
    model = Layers()
    params = list(model.parameters())
    with pool_of(model, settings) as pool:
        pool.zero_grad()
        loss_of(model, 0).backward()
        before = state(model)
        for use in uses(params, torch.optim.SGD(params, lr=0.1, fused=True)):
            with pytest.raises(RuntimeError, match=r"on its way to the other ranks; call pool\.finish\(\)"):
                use()
        assert params[0].grad.shape == params[0].shape
        assert "on its way" in repr(params[0].grad)
        assert alike(state(model), before)
        params[0].grad = torch.ones_like(params[0])
        with pytest.raises(RuntimeError, match=r"layer0\.weight was replaced while .* call pool\.finish\(\)"):
            pool.finish()


def unfreeze(model: Layers) -> nn.Module:
    model.layer0.requires_grad_(True)
    return model


def give_a_new_head(model: Layers) -> nn.Module:
    model.layer4 = nn.Linear(8, 8)
    return model


def parametrize(model: Layers) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model.layer2)
    return model


def assign(model: Layers) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model.layer0.requires_grad_(False)
    return model


def add_another(model: Layers) -> nn.Module:
    return nn.Sequential(model, nn.Linear(8, 8))


def replace_all(model: Layers) -> nn.Module:
    return nn.ParameterList(nn.Parameter(p.detach().clone()) for p in model.parameters())  # type: ignore[return-value]


@ENGINES
@pytest.mark.parametrize("change", [unfreeze, give_a_new_head, parametrize, assign, add_another, replace_all])
def test_parameters_that_are_in_no_pool_are_refused_in_words(
    settings: EngineSettings, change: Callable[[Layers], nn.Module]
):
    words = "none of this pool's parameters" if change is replace_all else "in no gradient pool"
    run(2, _stepped_after, settings, change, words, fresh=True)


def _stepped_after(settings: EngineSettings, change: Callable[[Layers], nn.Module], words: str) -> None:
    model = Layers()
    model.layer0.requires_grad_(False)
    with pool_of(model, settings) as pool:
        changed = change(model)
        pool.zero_grad()
        loss_of(model if change is replace_all else changed, 0).backward()
        with pytest.raises(ValueError, match=words):
            pool.step(torch.optim.SGD([p for p in changed.parameters() if p.requires_grad], lr=0.1))


@ENGINES
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (give_a_new_head, r"layer4\.weight has a gradient but is in no gradient pool"),
        (assign, r"layer4\.bias is no longer the parameter"),
    ],
)
def test_finish_refuses_a_model_whose_parameters_changed(
    settings: EngineSettings, change: Callable[[Layers], nn.Module], words: str
):
    """Also for whoever calls the optimizer's own step."""
    run(2, _finished_after, settings, change, words, fresh=True)


def _finished_after(settings: EngineSettings, change: Callable[[Layers], nn.Module], words: str) -> None:
    model = Layers()
    with pool_of(model, settings) as pool:
        change(model)
        model.requires_grad_(True)
        pool.zero_grad()
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=words):
            pool.finish()


def test_an_optimizer_that_steps_in_backward_is_refused():
    run(2, _stepped_in_backward)


def _stepped_in_backward() -> None:
    model = Layers()

    def step_now(param: nn.Parameter) -> None:
        param.grad = None

    hook = model.layer2.weight.register_post_accumulate_grad_hook(step_now)
    with pool_of(model, LAZY) as pool:
        pool.zero_grad()
        with pytest.raises(
            RuntimeError, match=r"a hook took the gradient of layer2\.weight away before it was averaged"
        ):
            loss_of(model, 0).backward()
        hook.remove()
        take_steps(pool, model, sgd(model), 1)


def test_a_wrapper_of_ddp_that_was_left_is_refused():
    run(2, _left_in_ddp)


def _left_in_ddp() -> None:
    """Both average: ranks would diverge, and by another amount in each run."""
    with pytest.raises(ValueError, match="DistributedDataParallel averages gradients itself; give the pool"):
        GradientPool(DistributedDataParallel(Layers()))
    model = Layers()
    forward = DistributedDataParallel(model)
    with pool_of(model, LAZY) as pool:
        pool.zero_grad()
        with pytest.raises(RuntimeError, match="DistributedDataParallel calls the model of this gradient pool"):
            forward(images(0))
        take_steps(pool, model, sgd(model), 1)


def test_an_engine_of_another_pool_is_refused():
    one, other = GradientPool(Layers()), GradientPool(Layers())
    engine = build_engine(LAZY, one)
    with pytest.raises(ValueError, match="this engine was built for another pool"):
        other.attach(engine)
    one.attach(engine)


def test_a_second_pool_needs_the_first_one_closed():
    model = Layers()
    with closing(GradientPool(model)), pytest.raises(ValueError, match=r"is in another gradient pool; close\(\) that"):
        GradientPool(model.layer1)
    GradientPool(model.layer1).close()
