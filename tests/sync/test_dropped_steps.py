"""A step that is dropped leaves nothing behind, in engines that keep residuals as well; a loss scale may change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import DearSync, EngineSettings, GradientPool, HybridSync, LazySync, PowerSgdSync, SparseSync
from imagenet_fast.sync.reshard_state import reshard_sync_state
from imagenet_fast.training import optimizers
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.loops import DEAR, HYBRID, LAZY, Layers, alike, average_by_hand, backward, loss_of, pooled, trained

KEEPING: dict[str, EngineSettings] = {
    "int8": LazySync(wire="int8", threshold_mb=0),
    "fp8 deferred": DearSync(wire="fp8", bucket_mb=0),
    "int8 butterfly": HybridSync(wire="int8", fuse_mb=0),
    "powersgd": PowerSgdSync(wire="fp32", rank=1, bucket_mb=0.001, dense_epochs=0),
    "sparse": SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0),
    "sparse deferred": SparseSync(
        wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0, timing="hybrid"
    ),
    "sparse corrected": SparseSync(
        wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0, momentum_correction=True, momentum=0.5
    ),
}  # fmt: skip


def own_sgd(
    model: nn.Module, momentum: float = 0.9, weight_decay: float = 0.0, corrected: bool = False
) -> optimizers.SGD:
    return build_optimizer(Sgd(kind="sgd", lr=0.02, momentum=momentum, weight_decay=weight_decay), model, corrected)


def unfinished(model: Layers, pool: GradientPool) -> None:
    pool.zero_grad()
    (100 * loss_of(model, 50)).backward()


def failed(model: Layers, pool: GradientPool) -> None:
    assert not backward(model, pool, 51, (3, 1)[dist.get_rank()])


def micro_step(model: Layers, pool: GradientPool) -> None:
    pool.zero_grad()
    with pool.no_sync():
        (100 * loss_of(model, 52)).backward()


def after_step(model: Layers, pool: GradientPool) -> None:
    (100 * loss_of(model, 53)).backward()


def test_what_is_dropped_leaves_no_trace():
    run(2, _leaves_no_trace)


def _leaves_no_trace() -> None:
    def dropping(drop: Callable[[Layers, GradientPool], object], pool: Any, model: Any, _: object, step: int) -> None:
        if step in (3, 6):
            drop(model, pool)
            model.fails = None

    for name, settings in KEEPING.items():
        optimizer_of = partial(own_sgd, weight_decay=1e-4, corrected=settings.velocity_momentum is not None)
        together = partial(trained, optimizer_of=optimizer_of, steps=8)
        expected = together(settings)
        for drop in (unfinished, failed, micro_step, after_step):
            with pytest.warns(UserWarning, match="drops gradients") if drop is unfinished else _quietly():
                dropped = together(settings, before=partial(dropping, drop))
            assert alike(dropped, expected), (name, drop.__name__)


def _quietly() -> AbstractContextManager[None]:
    return nullcontext()


def test_ranks_that_fail_at_other_gradients_stay_in_step():
    run(2, _stay_in_step)


def _stay_in_step() -> None:
    def fail(pool: Any, model: Any, _: object, step: int) -> None:
        if step not in (0, 3):
            return
        pool.zero_grad()
        if dist.get_rank() == 0:
            hook = model.layer2.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, step)
            hook.remove()
        else:
            assert not backward(model, pool, step, 1)
            model.fails = None

    for settings in (HYBRID, DEAR, LAZY):
        assert alike(trained(settings, before=fail), trained(settings)), settings


def test_a_changed_loss_scale_changes_no_residual():
    """Powers of two: with and without a scale the same bits come out."""
    run(2, _changed_scale)


def _changed_scale() -> None:
    def scaled(settings: EngineSettings, scales: list[float]) -> dict[str, Tensor]:
        scale = torch.ones(())

        def rescale(pool: Any, _: object, optimizer: Any, step: int) -> None:
            if step == 0:
                pool.set_loss_scale(scale)
            scale.fill_(scales[step])
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / scales[step]

        return trained(
            settings, loss=lambda model, step: scales[step] * loss_of(model, step), before=rescale,
            optimizer_of=partial(own_sgd, momentum=0.0), steps=len(scales),
        )  # fmt: skip

    for name in ("int8", "int8 butterfly", "powersgd", "sparse", "sparse corrected"):
        settings = KEEPING[name]
        changed = scaled(settings, [1.0, 4.0, 4.0, 0.25, 0.25, 1024.0, 2.0])
        for key, value in scaled(settings, [1.0] * 7).items():
            torch.testing.assert_close(changed[key], value, rtol=1e-4, atol=1e-5)


def test_grad_scaler_steps_through_the_pool_as_by_hand():
    run(2, _grad_scaler)


def _grad_scaler() -> None:
    def scaled(settings: EngineSettings | None, clips: bool, own: bool) -> dict[str, Tensor]:
        scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2)

        def scaled_loss(model: nn.Module, step: int) -> Tensor:
            infinite = step in (2, 5) and dist.get_rank() == step % 2
            return scaler.scale(loss_of(model, step) * (torch.inf if infinite else 1.0))

        def end(pool: GradientPool | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if pool is None:
                average_by_hand(model)
            elif clips or own:
                pool.finish()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if pool is None or own:
                scaler.step(optimizer)
                scaler.update()
            else:
                pool.step(optimizer, scaler)

        return trained(settings, loss=scaled_loss, optimizer_of=momentum_sgd, steps=8, end=end)

    for clips in (False, True):
        expected = scaled(None, clips, own=False)
        for settings in (HYBRID, DEAR, LAZY):
            for own in (False, True):
                assert alike(scaled(settings, clips, own), expected), (settings, clips, own)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_a_layer_that_no_rank_used_is_not_decayed_after_finish():
    model = Layers()
    model.extra = nn.Linear(8, 8)
    before = model.extra.weight.clone()
    pool = pooled(model, HYBRID)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        pool.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        pool.finish()
        scaler.step(optimizer)
        scaler.update()
    pool.close()
    assert torch.equal(model.extra.weight, before)


def test_a_loss_scale_under_sparse_unscales_what_was_sent_alone():
    """What has yet to be sent is no gradient of this step, and stays in scaled units."""
    run(2, _unscales_what_was_sent)


def _unscales_what_was_sent() -> None:
    def scaled(scale: float) -> dict[str, Tensor]:
        def unscaling(model: nn.Module) -> optimizers.SGD:
            optimizer = own_sgd(model, momentum=0.0)
            optimizer.grad_scale = torch.tensor(scale)
            return optimizer

        return trained(
            KEEPING["sparse"], loss=lambda model, step: scale * loss_of(model, step), optimizer_of=unscaling, steps=8
        )

    expected = scaled(1.0)
    for name, value in scaled(1024.0).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_the_residuals_loss_scale_goes_to_another_number_of_ranks():
    model = Layers()
    pool = pooled(model, KEEPING["sparse"])
    pool.set_loss_scale(torch.tensor(8.0))
    pool.zero_grad()
    loss_of(model, 0).backward()
    pool.end_backward()
    states = [pool.state_dict()] * 2
    pool.close()
    assert reshard_sync_state(states)["loss_scale"] == 8.0
