"""SGD and LARS against a float64 reference, and torch's SGD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from imagenet_fast.recipe.optim_config import Lars, Sgd
from imagenet_fast.sync.per_param_step import snapshot_step
from imagenet_fast.training.lr_schedule import set_rate
from imagenet_fast.training.optimizers import LARS, SGD, build_optimizer, param_groups, split_parameters, total_norm
from tests.sync.given import weights_of
from tests.sync.loops import Layers, loss_of

SHAPES = [(16, 3, 3, 3), (10, 16), (10,), (16,)]
MU, WD, ETA = 0.9, 5e-4, 0.001
ByHand = Callable[[nn.Parameter, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A step by its number, in float64: from a parameter's weight, gradient and velocity to its weight and velocity."""


def problem(seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Two weights that are decayed and two vectors that are not."""
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return params[:2], params[2:]


def groups_of(decayed: list[nn.Parameter], plain: list[nn.Parameter], **of_plain: float) -> list[dict[str, Any]]:
    return [{"params": decayed, "weight_decay": WD}, {"params": plain, "weight_decay": 0.0, **of_plain}]


def build(kind: str, seed: int = 0, **settings: Any) -> SGD:
    if kind == "sgd":
        return SGD(groups_of(*problem(seed)), 1.0, MU, **settings)
    settings = {"momentum": MU, "weight_decay": WD, "trust_coefficient": ETA} | settings
    decayed, plain = problem(seed)
    return LARS([{"params": decayed}, groups_of(decayed, plain, trust_coefficient=0.0)[1]], 1.0, **settings)


def step_at(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def gradients_of(step: int, params: Sequence[Tensor] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shapes = SHAPES if params is None else [param.shape for param in params]
    return [torch.randn(shape, generator=generator) * 10.0 ** (step % 3 - 1) for shape in shapes]


def give(params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()


def rate(step: int) -> float:
    return 0.5 + 0.25 * step


def descend(optimizer: torch.optim.Optimizer, steps: int = 8) -> list[nn.Parameter]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(steps):
        give(params, gradients_of(step))
        step_at(optimizer, rate(step))
    return params


def follows(
    optimizer: SGD, by_hand: ByHand, tight: Collection[nn.Parameter] = (),
    take: Callable[[SGD, float], object] = step_at,
) -> bool:  # fmt: skip
    """Whether it does as the steps written out; parameters in ``tight`` are small, or move little."""
    exact = {p: (p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in optimizer.params}
    for step in range(8):
        give(optimizer.params, gradients_of(step, optimizer.params))
        for param, (weight, velocity) in exact.items():
            exact[param] = by_hand(param, weight, param.grad.double(), velocity, step)
        take(optimizer, rate(step))
    return all(
        torch.allclose(param.detach().double(), weight, rtol=2e-6, atol=1e-7 if param in tight else 1e-5)
        for param, (weight, _) in exact.items()
    )


def lars_by_hand(scaled: Collection[nn.Parameter], clip: bool = False, epsilon: float = 0.0) -> ByHand:
    def update(param: nn.Parameter, w: Tensor, g: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        ratio, decay = 1.0, 0.0
        if param in scaled and clip:
            ratio, decay = min(1.0, float((1 - MU) * ETA * w.norm() / g.norm()) / rate(step)), WD
        elif param in scaled:
            ratio, decay = float(ETA * w.norm() / (g.norm() + WD * w.norm() + epsilon)), WD
        v = MU * v + ratio * (g + decay * w)
        return w - rate(step) * v, v

    return update


@pytest.mark.parametrize(("clip", "epsilon"), [(False, 0.0), (False, 1e-2), (True, 0.0)])
@pytest.mark.parametrize("biases", ["plain", "scaled"])
def test_lars_follows_the_float64_reference(biases: Literal["plain", "scaled"], clip: bool, epsilon: float):
    """A norm layer's scale and shift are plain whatever biases are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5))
    nn.init.constant_(model.get_parameter("0.bias"), 0.01)
    settings = Lars(
        kind="lars", lr=1.0, momentum=MU, weight_decay=WD, trust_coefficient=ETA, clip=clip, biases=biases,
        epsilon=epsilon,
    )  # fmt: skip
    names = ["0.weight", "2.weight"] + (["0.bias", "2.bias"] if biases == "scaled" else [])
    scaled = {model.get_parameter(name) for name in names}
    assert follows(build_optimizer(settings, model), lars_by_hand(scaled, clip, epsilon), tight=scaled)


@pytest.mark.parametrize("decay_all", [False, True])
def test_sgd_follows_the_float64_reference_and_torch(decay_all: bool):
    """Biases and norms are decayed where the recipe says so."""

    def heavy_ball(param: nn.Parameter, w: Tensor, g: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        v = MU * v + g + (WD if decay_all or param.dim() > 1 else 0.0) * w
        return w - rate(step) * v, v

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5))
    settings = Sgd(kind="sgd", lr=1.0, momentum=MU, weight_decay=WD, decay_all=decay_all)
    assert follows(build_optimizer(settings, model), heavy_ball)
    theirs = torch.optim.SGD(groups_of(*problem()), lr=1.0, momentum=MU, nesterov=True)
    torch.testing.assert_close(descend(build("sgd", nesterov=True)), descend(theirs), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_a_zero_norm_means_a_trust_ratio_of_one(zero: str):
    optimizer = build("lars")
    give(optimizer.params, gradients_of(1))
    first = optimizer.params[0]
    (first.data if zero == "weight" else first.grad).zero_()
    before = first.detach().clone()
    expected = before - (first.grad + WD * before)  # as plain SGD would
    optimizer.step()
    torch.testing.assert_close(first.detach(), expected)
    assert all(p.isfinite().all() for p in optimizer.params)


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_elements_that_were_not_sent_stand_still_with_their_momentum(kind: str):
    optimizer, dense = build(kind), build(kind)
    channels = next(p for p in optimizer.params if p.dim() == 4)
    parts = [slice(2, 9), slice(20, 21)]
    for step in range(2):
        for one in (optimizer, dense):
            give(one.params, gradients_of(step))
        before = channels.detach().clone()
        step_at(dense, 0.1)
        optimizer.elements = {p: parts if p is channels else [slice(0, p.numel())] for p in optimizer.params}
        step_at(optimizer, 0.1)
        moved = (channels.detach() != before).as_strided((channels.numel(),), (1,))
        assert moved[2:9].all()
        assert moved[20]
        assert moved.sum() == 8
    for one, other in zip(optimizer.params, dense.params, strict=True):
        if one is not channels:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sgd", {}), ("lars", {}), ("sgd", {"corrected": True}), ("sgd", {"decoupled_lr": 1.0})],
    ids=["sgd", "lars", "corrected", "decoupled"],
)
def test_a_non_finite_step_changes_no_bit(kind: str, settings: dict[str, Any]):
    optimizer = build(kind, **settings)
    descend(optimizer, steps=2)
    weights = [p.detach().clone() for p in optimizer.params]
    velocity = [v.clone() for v in optimizer.velocity.values()]
    for param in optimizer.params:
        param.grad = torch.full_like(param, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    found = [*optimizer.params, *optimizer.velocity.values()]
    assert all(torch.equal(was, now) for was, now in zip([*weights, *velocity], found, strict=True))


class Calls(TorchDispatchMode):
    """A count of torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        Sgd(kind="sgd", lr=0.1, weight_decay=WD), Lars(kind="lars", lr=0.1, weight_decay=WD),
        Lars(kind="lars", lr=0.1, weight_decay=WD, clip=True),
    ],
)  # fmt: skip
def test_an_updates_operators_do_not_grow_with_the_tensors(settings: Sgd | Lars):
    """Each takes the host's time, however few numbers it touches; `tests/gpu` counts the kernels."""
    counts = set()
    for layers in (2, 20):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = build_optimizer(settings, model)
        for _ in range(3):  # the first makes the momentum
            give(optimizer.params, list(map(torch.ones_like, optimizer.params)))
            with Calls() as calls:
                optimizer.step()
        counts.add(calls.count)
    assert len(counts) == 1, counts


def test_gradient_norm_is_torchs():
    optimizer = build("sgd")
    assert total_norm(optimizer.params).item() == 0.0, "of none"
    give(optimizer.params[1:], gradients_of(1)[1:])
    torch.testing.assert_close(total_norm(optimizer.params), nn.utils.clip_grad_norm_(optimizer.params, 1e9))


@pytest.mark.parametrize("param", [torch.ones(4, 6).chunk(2, 1)[0], torch.ones(3, 1).expand(3, 5), torch.ones(9)[::2]])
def test_a_parameter_that_does_not_fill_its_memory_is_refused(param: Tensor):
    with pytest.raises(ValueError, match=r"write past it: .*nn\.Parameter\(p\.clone\(\)\)"):
        SGD([nn.Parameter(param)], 1.0, MU)
    SGD([nn.Parameter(param.clone()), nn.Parameter(torch.ones(3, 5).t())], 1.0, MU)


def test_a_state_that_was_cleared_begins_anew():
    param = nn.Parameter(torch.ones(3))
    optimizer = SGD([param], lr=0.25, momentum=0.5)
    for _ in range(2):
        param.grad = torch.ones(3)
        optimizer.step()
        optimizer.state.clear()
    assert torch.equal(param, torch.full((3,), 0.5)), "twice by the gradient alone"


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))


def test_norms_are_known_by_module_or_by_their_parameters_and_frozen_weights_are_left_out():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Linear(4, 2),
        nn.TransformerEncoderLayer(8, 2, 16), nn.RMSNorm(8), OwnNorm(),
    )  # fmt: skip
    frozen = model.get_parameter("4.weight").requires_grad_(False)
    names = {param: name for name, param in model.named_parameters() if param is not frozen}
    layers = {"0.", "5.self_attn.in_proj_", "5.self_attn.out_proj.", "5.linear1.", "5.linear2."}
    decayed, plain = split_parameters(model)
    assert {names[param] for param in decayed} == {f"{layer}weight" for layer in layers}
    assert len(decayed) + len(plain) == len(names)
    scaled, _ = split_parameters(model, scale_biases=True)
    assert {names[param] for param in scaled} - {names[param] for param in decayed} == {
        f"{layer}bias" for layer in (*layers, "4.")
    }
    assert {*build_optimizer(Lars(kind="lars", lr=1.0, weight_decay=WD), model).params} == {*names}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_decoupled_decay_is_composers(nesterov: bool, deferred: bool):
    """DecoupledSGDW written out: decay follows the schedule from wd at the peak rate, and takes no part in momentum."""
    model, peak, wd = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 2.0, 0.03
    settings = Sgd(kind="sgd", lr=peak, momentum=MU, nesterov=nesterov, weight_decay=wd, decay_all=True, decoupled=True)

    def by_hand(param: nn.Parameter, w: Tensor, g: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        v = MU * v + g
        return (1 - rate(step) / peak * wd) * w - rate(step) * (g + MU * v if nesterov else v), v

    def step_late(optimizer: SGD, lr: float) -> None:
        set_rate(optimizer, lr)
        apply = snapshot_step(optimizer)
        set_rate(optimizer, 77.0)  # the schedule has gone on
        for param in reversed(optimizer.params):
            apply([param])

    assert follows(build_optimizer(settings, model), by_hand, take=step_late if deferred else step_at)


@pytest.mark.parametrize("decoupled", [False, True])
def test_norm_biases_may_have_a_rate_of_their_own_and_shrink_like_the_rest(decoupled: bool):
    """Airbench's: the biases' rate is a multiple of the others' at each step, and their decay is not."""
    model, peak, decay, factor = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 2.0, 0.03, 64.0
    model[1].weight.requires_grad_(False)
    settings = Sgd(
        kind="sgd", lr=peak, momentum=MU, nesterov=True, weight_decay=decay, decay_all=True, decoupled=decoupled,
        norm_bias_factor=factor,
    )  # fmt: skip
    optimizer = build_optimizer(settings, model)
    assert optimizer.params == [model[0].weight, model[0].bias, model[1].bias]

    def by_hand(param: nn.Parameter, w: Tensor, g: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        lr = rate(step) * (factor if param is model[1].bias else 1.0)
        shrink = decay * rate(step) / (peak if decoupled else lr)  # per unit of the gradient's rate, if coupled
        g = g + (0.0 if decoupled else shrink) * w
        v = MU * v + g
        return (1 - shrink if decoupled else 1.0) * w - lr * (g + MU * v), v

    assert follows(optimizer, by_hand, take=lambda optimizer, lr: (set_rate(optimizer, lr), optimizer.step()))
    model = nn.Linear(3, 2)  # without norms
    optimizer = build_optimizer(Sgd(kind="sgd", lr=1.0, weight_decay=WD, norm_bias_factor=8.0), model)
    assert {id(param) for param in optimizer.params} == {id(param) for param in model.parameters()}
    assert all(group["lr"] == 1.0 for group in optimizer.param_groups)


def test_lars_steps_with_a_closure_and_leaves_unused_parameters():
    model, idle = Layers(), nn.Parameter(torch.ones(3, 3))
    optimizer = LARS([*param_groups(model), {"params": [idle]}], lr=1.0, weight_decay=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    before = weights_of(model)
    assert optimizer.step(closure).item() == loss_of(Layers(), 0).item()
    assert not torch.equal(weights_of(model), before)
    assert (idle == 1).all()


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_gradients_and_momenta_of_other_strides_are_updated_element_by_element(kind: str):
    """As in a loop that sets ``p.grad`` itself, or loads momenta from a file, for a channels_last model."""
    torch.manual_seed(0)
    start, gradients, momentum = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2), torch.randn(4, 3, 2, 2)

    def trained(format: torch.memory_format) -> tuple[Tensor, Tensor]:
        param = nn.Parameter(start.clone().to(memory_format=format))
        optimizer = LARS([param], lr=0.1) if kind == "lars" else SGD([param], lr=0.1, momentum=0.9)
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {0: {"momentum_buffer": momentum.clone()}}})
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
        return param.detach(), optimizer.velocity[param]

    for got, expected in zip(trained(torch.channels_last), trained(torch.contiguous_format), strict=True):
        torch.testing.assert_close(got, expected)
