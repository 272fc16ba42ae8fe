"""PowerSGD: ranks stay alike, what is not applied is kept, and every engine's timing gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.sync import (
    DdpSync,
    GradientPool,
    GradientSync,
    LazySync,
    PowerSgdSync,
    attach,
    build_engine,
    powersgd,
)
from imagenet_fast.sync.powersgd import PowerSGD, matrix_shape
from tests.ranks import run
from tests.sync.loops import Layers, backward

SHAPES = [(12, 3, 3, 3), (12,), (40, 30), (30, 40), (), (1, 50), (64, 9)]
COMPRESSED = (0, 2, 3, 6)
Gradients = Sequence[Tensor | None]


class Layer(nn.Module):
    """A parameter whose gradient is what ``forward`` is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        self.weight = nn.Parameter(torch.zeros(shape).to(memory_format=memory))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Given(nn.Module):
    """A layer a shape; where there is no gradient, it is not used."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for shape in shapes)

    def forward(self, gradients: Gradients) -> Tensor:
        pairs = zip(self.layers, gradients, strict=True)
        return torch.stack([layer(g) for layer, g in pairs if g is not None]).sum()


def settings(**changes: object) -> PowerSgdSync:
    return PowerSgdSync.model_validate(
        {"wire": "fp32", "rank": 2, "bucket_mb": 0.0, "collective": "pairwise", **changes}
    )


def pooled(model: nn.Module, chosen: PowerSgdSync | LazySync) -> GradientPool:
    """What the network is like is no matter here."""
    patch("imagenet_fast.sync.network_benchmark.measure_link", lambda *_: LinkModel(1e-4, 1e-8)).start()
    pool = GradientPool(model)
    pool.attach(build_engine(chosen, pool))
    return pool


def drawn(step: int, rank: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def applied(pool: GradientSync, model: Given, gradients: Gradients) -> list[Tensor | None]:
    """What a step updates the layers with, in memory's order."""
    seen: dict[nn.Parameter, Tensor] = {}
    pool.zero_grad()
    model(gradients).backward()
    pool.end_backward()
    pool.update(lambda params: seen.update((p, in_memory_order(p.grad).clone()) for p in params))
    pool.settle()
    return [seen.get(layer.weight) for layer in model.layers]


def in_memory_order(values: Tensor) -> Tensor:
    return values.as_strided((values.numel(),), (1,))


def kept(pool: GradientPool, which: str) -> dict[int, Tensor]:
    """Errors, or Q, by layer."""
    assert pool.reducer.engine is not None
    memory = pool.reducer.engine.state_dict()["memory"]
    return {int(name.split(".")[1]): own[which] for name, own in memory.items()}


def mean(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def alike(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """To the bit."""
    pairs = zip(some, others, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_a_parameter_is_the_matrix_that_it_is_in_memory():
    shapes = [
        (torch.ones(8, 3, 5, 5), (8, 75)),
        (torch.ones(8, 3, 5, 5).to(memory_format=torch.channels_last), (8, 75)),
        (torch.ones(6, 4).T, (6, 4)),
        (torch.ones(1, 5, 7), (5, 7)),
        (torch.ones(5, 1), (5, 1)),
        (torch.ones(()), (1, 1)),
        (torch.ones(0, 3), (0, 0)),
    ]
    for values, shape in shapes:
        assert matrix_shape(nn.Parameter(values)) == shape


def test_only_what_becomes_smaller_is_compressed():
    model = nn.ModuleList([nn.Linear(40, 30), nn.Linear(4, 4), nn.Conv2d(3, 12, 3)])
    values_sent = {slot.name: PowerSGD(2).values_sent(slot) for slot in GradientPool(model).slots}
    assert values_sent["0.weight"] == 2 * (40 + 30) + 1, "and whether it has been used"
    assert values_sent["2.weight"] == 2 * (12 + 27) + 1
    assert 16 < values_sent["1.weight"] <= 32, "two factors of 8 values are no smaller"
    assert 30 < values_sent["0.bias"] < 64


def test_powersgd_error_feedback_bitwise():
    results = run(3, _conserves)
    for timings in results:
        for steps in timings.values():
            assert all(alike(one, other) for one, other in zip(results[0]["lazy"], steps, strict=True))


def _conserves() -> dict[str, list[list[Tensor | None]]]:
    """In one step nobody uses a layer, in another a single rank uses it."""
    results = {}
    for timing in ("lazy", "hybrid", "dear"):
        model = Given().double()
        pool = pooled(model, settings(timing=timing))
        residuals = {number: torch.zeros(math.prod(SHAPES[number]), dtype=torch.float64) for number in COMPRESSED}
        steps = results[timing] = list[list[Tensor | None]]()
        for step in range(8):
            gradients = drawn(step, dist.get_rank())
            if step == 3 or (step == 4 and dist.get_rank() != 1):
                gradients[2] = None
            steps.append(applied(pool, model, gradients))
            errors = {number: mean(error).view(-1) for number, error in kept(pool, "error").items()}
            assert errors.keys() == set(COMPRESSED)
            for number, (layer, gradient, result) in enumerate(zip(model.layers, gradients, steps[-1], strict=True)):
                own = torch.zeros_like(layer.weight) if gradient is None else layer.weight.detach() * 0 + gradient
                came = mean(in_memory_order(own))
                if (step, number) == (3, 2):
                    assert result is None
                    assert torch.equal(errors[2], residuals[2])
                elif number in COMPRESSED:
                    assert result is not None
                    torch.testing.assert_close(result + errors[number], came + residuals[number])
                    assert not torch.allclose(result, came), "it is an approximation"
                else:
                    assert result is not None
                    torch.testing.assert_close(result, came)
            residuals = errors
        pool.close()
    return results


def test_a_mean_of_low_rank_is_recovered_and_nothing_is_kept_of_it():
    run(2, _recovers)


def _recovers() -> None:
    """Of rank 2 over both ranks together; 1 is what the rank 2 of the setting leaves room for, 0 is none."""
    rank, shape = dist.get_rank(), (40, 30)
    for dtype, near, ranks in (
        (torch.float64, 1e-6, (1, 0, 1, 0, 0, 1)),
        (torch.float32, 1e-4, (1, 0, 1, 0, 0, 1)),
        (torch.bfloat16, 0.05, (1,)),
    ):
        model = Given([shape]).to(dtype)
        pool = pooled(model, settings(timing="allreduce"))
        for step, true_rank in enumerate(ranks):
            generator = torch.Generator().manual_seed(10 * step + rank)
            left, right = (torch.randn(size, true_rank, generator=generator) for size in shape)
            gradient = (left @ right.T).to(dtype)
            (result,) = applied(pool, model, [gradient])
            assert result is not None
            expected = mean(gradient.double()).view(-1)
            torch.testing.assert_close(result.double(), expected, rtol=0, atol=near * max(1.0, float(expected.max())))
            assert kept(pool, "q")[0].dtype == (dtype if dtype != torch.bfloat16 else torch.float32)
        pool.close()


def test_a_rank_that_makes_nothing_smaller_is_the_mean_itself():
    run(2, _at_full_rank)


def _at_full_rank() -> None:
    lazy, full = Given(), Given()
    pools = [pooled(lazy, LazySync(wire="bf16", collective="pairwise")), pooled(full, settings(wire="bf16", rank=64))]
    for step in range(3):
        gradients = [None if g is None else g.float() for g in drawn(step, dist.get_rank())]
        assert alike(*(applied(pool, model, gradients) for pool, model in zip(pools, (lazy, full), strict=True)))
    assert not kept(pools[1], "error")


def test_directions_along_which_nothing_comes_are_not_lost():
    """At first nothing comes, then only to the last row and column, which an identity would not see."""
    run(1, _quiet, 2)
    run(2, _quiet, 2)


def _quiet(rank: int) -> None:
    model = Given([(40, 30)])
    pool = pooled(model, settings(rank=rank))
    for step in range(6):
        gradient = torch.zeros(40, 30)
        if step >= 3:
            gradient[-1, -1] = 2.0
        (result,) = applied(pool, model, [gradient])
        assert result is not None
        torch.testing.assert_close(result, gradient.view(-1), rtol=0, atol=1e-5)


def test_nonfinite_reaches_every_rank_and_stays_out_of_the_residual():
    for one, other in zip(*run(2, _poisoned), strict=True):
        assert alike(one, other)


def _poisoned() -> list[list[Tensor | None]]:
    rank, steps = dist.get_rank(), []
    for timing in ("lazy", "dear"):
        for value in (math.nan, math.inf, 1e38):
            model = Given()
            pool = pooled(model, settings(timing=timing, wire="fp16" if value == 1e38 else "fp32"))
            for step in range(6):
                gradients = [None if g is None else g.float() for g in drawn(step, rank)]
                before = kept(pool, "error"), kept(pool, "q")
                if step == 3 and rank == 1:
                    assert gradients[2] is not None
                    gradients[2][7, 3] = value
                result = applied(pool, model, gradients)
                if step == 3:
                    assert result[2] is not None
                    assert result[2].isnan().all()
                    assert alike([before[0][2], before[1][2]], [kept(pool, "error")[2], kept(pool, "q")[2]])
                    steps.append(result[3:])
                else:
                    steps.append(result)
                finite = [values is None or bool(values.isfinite().all()) for values in steps[-1]]
                assert all(finite), (timing, value, step)
            pool.close()
    return steps


def test_it_trains_on_after_a_backward_that_failed_alike_on_all_ranks():
    one, other = run(2, _failing)
    assert one.isfinite().all()
    assert torch.equal(one, other)


def _failing() -> Tensor:
    model = Layers()
    pool = pooled(model, settings(timing="hybrid"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        if backward(model, pool, step, (3, 1)[dist.get_rank()] if step in (2, 4) else None):
            pool.step(optimizer)
    pool.settle()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_rank_alone_approximates_nothing():
    run(1, _alone)


def _alone() -> None:
    model = Given()
    pool = pooled(model, settings(wire="bf16"))
    for step in range(3):
        gradients = drawn(step, 0)
        result = applied(pool, model, gradients)
        for layer, gradient, values in zip(model.layers, gradients, result, strict=True):
            assert gradient is not None
            assert values is not None
            assert torch.equal(values, in_memory_order(layer.weight.detach() * 0 + gradient.float()))
    assert pool.end_backward().sent_bytes == 0


def test_a_state_dict_continues_to_the_bit():
    run(2, _continues)


def _continues() -> None:
    """From the beginning, from dense steps, and from compressed ones, with a message for every few layers."""
    for timing, dense in (("lazy", 2), ("dear", 3)):
        chosen = settings(timing=timing, dense_epochs=dense, bucket_mb=0.005)
        for taken in (1, 7):
            model, other = Given(), Given()
            pool, other_pool = pooled(model, chosen), pooled(other, chosen)
            for step in range(taken):
                applied(pool, model, [None if g is None else g.float() for g in drawn(step, dist.get_rank())])
            assert pool.reducer.engine is not None
            assert other_pool.reducer.engine is not None
            other_pool.reducer.engine.load_state_dict(pool.reducer.engine.state_dict())
            for step in range(taken, taken + 4):
                gradients = [None if g is None else g.float() for g in drawn(step, dist.get_rank())]
                assert alike(applied(pool, model, gradients), applied(other_pool, other, gradients)), (timing, step)
            pool.close()
            other_pool.close()


def test_powersgd_beside_ddps_hook():
    (ours, ours_sent), (theirs, theirs_sent) = run(2, _beside_ddp)[0]
    assert ours[:5] == theirs[:5], "both begin with five steps as they are"
    assert ours[-1] < 0.5 * ours[5]
    assert 0.9 < sum(ours[5:15]) / sum(theirs[5:15]) < 1.1
    assert ours_sent[4] > 5 * ours_sent[-1]
    assert ours_sent[-1] < 1.05 * theirs_sent[-1]


def _beside_ddp() -> list[tuple[list[float], list[int]]]:
    return [trained(settings(dense_epochs=5, bucket_mb=1.0)), trained(DdpSync(powersgd_rank=2))]


def trained(chosen: PowerSgdSync | DdpSync) -> tuple[list[float], list[int]]:
    """Mean losses and bytes sent of 30 steps on the same images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    forward, sync = attach(model, chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    images, labels = torch.randn(32, 3, 8, 8, generator=generator), torch.arange(32) % 10
    losses, sent = [], []
    for _ in range(30):
        sync.zero_grad()
        loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        sent.append(sync.end_backward().sent_bytes)
        sync.update(lambda params: optimizer.step())
        losses.append(float(mean(loss.detach())))
    return losses, sent


def test_products_on_a_gpu_are_fp32_whatever_the_model_takes():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with powersgd._exact_products(torch.device("cuda")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_batched_orthonormalisation_bitwise():
    matrices = [torch.randn(rows, 3) for rows in (8, 5, 8, 8, 5)]
    with patch.object(powersgd, "_orthonormal", wraps=powersgd._orthonormal) as counted:
        together = powersgd._each_orthonormal(matrices)
    assert counted.call_count == 2
    assert all(torch.equal(q, torch.linalg.qr(m).Q) for q, m in zip(together, matrices, strict=True))
