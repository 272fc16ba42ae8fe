"""With updates put off, nobody reads, saves or copies a weight of the step before."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune, spectral_norm, weight_norm

from imagenet_fast.sync import EngineSettings, GradientPool, HybridSync, LazySync, build_engine
from imagenet_fast.sync.access_hooks import Hook
from imagenet_fast.sync.per_param_step import snapshot_step
from tests.ranks import run
from tests.sync.loops import (
    DEFERRING,
    HYBRID,
    alike,
    at_once,
    images,
    loss_of,
    pooled,
    sgd,
    state,
    take_steps_together,
    trained,
)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def same_as_at_once(settings: EngineSettings, build: Callable[[], nn.Module] = perceptron, **bent: object) -> bool:
    return alike(trained(settings, build, after=at_once, **bent), trained(settings, build, **bent))


def pruned() -> nn.Module:
    model = perceptron()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.3)
    return model


def weight_normed() -> nn.Module:
    model = perceptron()
    for layer in (model[0], model[2]):
        weight_norm(layer)
    return model


def spectrally_normed() -> nn.Module:
    model = perceptron()
    for layer in (model[0], model[2]):
        spectral_norm(layer)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build", [pruned, weight_normed, spectrally_normed])
@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_hooks_that_make_a_weight_of_parameters_find_them_up_to_date(
    settings: EngineSettings, build: Callable[[], nn.Module]
):
    assert same_as_at_once(settings, build)


class ReadEarly(nn.Module):
    """Reads weights before the layers that own them are called: of the data, of what has a gradient, and unrecorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(1)
        h = F.linear(x, self.body.weight) + F.embedding(tokens, self.words.weight)
        h = h + self.body(x) + self.words(tokens)
        with torch.no_grad():
            guess = F.linear(h, self.head.weight)
        out: Tensor = self.head(h.tanh()) + guess + F.linear(h, self.head.weight)
        return out.tanh()


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_weight_read_before_its_layer_is_up_to_date(settings: EngineSettings):
    assert same_as_at_once(settings, ReadEarly)


class CalledLater(nn.Module):
    """Begins at the third step to call a block, which reads the weight of a layer that comes after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.words = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decoder = Transposed(self.words.weight)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 2:
            x = self.decoder(x)
        out: Tensor = self.words(self.body(x).tanh())
        return out


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_module_not_called_at_first_is_up_to_date(settings: EngineSettings):
    assert same_as_at_once(settings, CalledLater)


def early(model: nn.Module) -> Tensor:
    """The same of each layer, without asking the model for its parameters."""
    weights = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    return 0.01 * torch.stack([p.square().sum() for p in weights]).sum()


def decay(model: nn.Module) -> Tensor:
    return 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_a_term_of_all_weights_is_right_before_forward_and_after_it(settings: EngineSettings):
    assert same_as_at_once(settings, loss=lambda model, step: loss_of(model, step) + decay(model))
    assert same_as_at_once(settings, loss=lambda model, step: decay(model) + loss_of(model, step))
    after_settling = trained(settings, perceptron, loss=lambda m, s: decay(m) + loss_of(m, s), after=at_once)
    other_way_round = trained(settings, perceptron, loss=lambda m, s: loss_of(m, s) + decay(m), after=at_once)
    for name, weight in after_settling.items():
        torch.testing.assert_close(weight, other_way_round[name])


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_a_weight_read_before_its_update_is_an_error(settings: EngineSettings):
    """Autograd's own: nobody else sees who reads a tensor. A fused optimizer alone would not tell it of the change."""
    for fused in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(
                settings, perceptron, lambda model, step: early(model) + loss_of(model, step),
                optimizer_of=partial(sgd, fused=fused),
            )  # fmt: skip


class Encoder(nn.Module):
    """The root reads a parameter of its own in a method, before it calls any layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.ones(8))
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x + self.position)  # a sum keeps nothing for backward that autograd could check
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def by_features(model: Encoder, step: int) -> Tensor:
    return model.features(images(step)).square().sum()


def by_forward(model: Encoder, step: int) -> Tensor:
    return model.forward(images(step)).square().sum()


def by_both(model: Encoder, step: int) -> Tensor:
    return model.body(images(step)).square().sum() + loss_of(model, step)


def judged_first(pool: object, model: nn.Module, optimizer: object, step: int) -> None:
    if step == 0:
        with torch.no_grad():
            model.eval()(images(99))
        model.train()


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
@pytest.mark.parametrize("loss", [by_features, by_forward, by_both])
def test_a_model_that_is_entered_by_a_method_after_a_call_is_up_to_date(
    settings: EngineSettings, loss: Callable[[Encoder, int], Tensor]
):
    for before in (judged_first, lambda *_: None):
        assert same_as_at_once(settings, Encoder, loss=loss, before=before)


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
@pytest.mark.parametrize("later", [by_features, by_forward])
def test_a_model_that_is_entered_in_another_way_later_is_refused(
    settings: EngineSettings, later: Callable[[Encoder, int], Tensor]
):
    def phases(model: Encoder, step: int) -> Tensor:
        return loss_of(model, step) if step < 3 else later(model, step)

    told = r"^body is called outside the module that called it .* position may .*; call pool\.settle\(\) before$"
    with pytest.raises(RuntimeError, match=told):
        trained(settings, Encoder, phases)
    trained(settings, Encoder, phases, before=lambda pool, *_: pool.settle())


def put_off(settings: EngineSettings = HYBRID, steps: int = 2) -> tuple[Encoder, GradientPool]:
    """A model whose last update is still to come."""
    model = Encoder()
    pool, optimizer = pooled(model, settings), sgd(model)
    for step in range(steps):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)
    return model, pool


def up_to_date() -> dict[str, Tensor]:
    model, pool = put_off()
    pool.settle()
    return state(model)


def inside(weights: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{module}."): w for name, w in weights.items() if name.startswith(f"{module}.")}


def test_the_state_of_a_part_of_the_model_is_up_to_date():
    model, _ = put_off()
    assert alike(state(model.body), inside(up_to_date(), "body"))


@pytest.mark.parametrize("part", ["", "body", "body.0"])
def test_what_is_loaded_is_not_updated_from_before(part: str):
    model, pool = put_off()
    module = model.get_submodule(part)
    module.load_state_dict({name: torch.ones_like(p) for name, p in module.named_parameters()})
    model(images(9))
    pool.settle()
    assert all(bool((p == 1).all()) for p in module.parameters())


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def pickled(module: nn.Module) -> nn.Module:
    loaded = pickle.loads(pickle.dumps(module))
    assert isinstance(loaded, nn.Module)
    return loaded


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])


@COPIES
@pytest.mark.parametrize("part", ["", "body", "body.0", "head"])
def test_a_copy_is_up_to_date(copied: Callable[[nn.Module], nn.Module], part: str):
    model, _ = put_off()
    assert alike(state(copied(model.get_submodule(part))), inside(up_to_date(), part) if part else up_to_date())


@COPIES
@pytest.mark.parametrize("settings", [HYBRID, LazySync()], ids=["hybrid", "lazy"])
def test_a_copy_trains_by_itself_and_so_does_the_original(
    copied: Callable[[nn.Module], nn.Module], settings: EngineSettings
):
    model, pool = put_off(settings)
    twin = copied(copied(model))
    before = state(twin)
    optimizer = sgd(twin)
    for step in range(2, 5):
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        optimizer.step()
    assert not alike(state(twin), before)
    pool.settle()
    assert alike(state(model), before)
    assert vars(twin).keys() == vars(Encoder()).keys()

    second = pooled(copied(model), settings)
    second.zero_grad()
    assert second.model is not None
    loss_of(second.model, 2).backward()
    second.step(sgd(second.model))
    second.settle()
    assert alike(state(model), before)


def test_a_copy_is_up_to_date_where_two_pools_share_the_model():
    model = Encoder()
    named = list(model.named_parameters())
    pools = [GradientPool(some, model=model) for some in (named[:2], named[2:])]
    for pool in pools:
        pool.attach(build_engine(HYBRID, pool))
    take_steps_together(pools, model, sgd(model), 2)
    for copied in (copy.deepcopy, pickled):
        assert alike(state(copied(model)), up_to_date())


def test_a_model_can_be_copied_while_the_first_steps_are_watched():
    run(2, _copied_while_watched)


def _copied_while_watched() -> None:
    for settings in (LazySync(), HybridSync()):
        model, pool = put_off(settings)
        for copied in (copy.deepcopy, pickled):
            twin = copied(model)
            assert any(isinstance(hook, Hook) for m in model.modules() for hook in m._forward_pre_hooks.values())
            assert not any(isinstance(hook, Hook) for m in twin.modules() for hook in m._forward_pre_hooks.values())
            pool.settle()
            assert alike(state(twin), state(model))


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_an_update_under_autocast_or_in_inference_mode_is_like_any_other(settings: EngineSettings):
    """Also the first, in which optimizers make their state."""
    results = []
    for surroundings in (
        lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.enable_grad, None,
    ):  # fmt: skip
        model = perceptron()
        pool, optimizer = pooled(model, settings), torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.end_backward()
            pool.update(partial(minding_surroundings, snapshot_step(optimizer)))
            if surroundings is None:
                pool.settle()
            else:
                with surroundings():
                    model(images(9))
        moments = [moment for values in optimizer.state.values() for moment in values.values()]
        assert not any(moment.is_inference() for moment in moments)
        assert {moment.dtype for moment in moments} == {torch.float32}
        results.append(state(model))
    assert all(alike(result, results[-1]) for result in results)


def minding_surroundings(apply: Callable[[list[nn.Parameter]], None], params: list[nn.Parameter]) -> None:
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    apply(params)


def test_threads_that_evaluate_at_once_do_not_update_twice():
    def evaluate(pool: GradientPool, model: nn.Module, *_: object) -> None:
        failures: list[Exception] = []

        def forward() -> None:
            try:
                with torch.no_grad():
                    model(images(9))
            except Exception as failure:
                failures.append(failure)

        threads = [threading.Thread(target=forward) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        evaluated = trained(HYBRID, deep, after=evaluate, steps=12)
    finally:
        sys.setswitchinterval(interval)
    assert alike(evaluated, trained(HYBRID, deep, steps=12))


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)))
