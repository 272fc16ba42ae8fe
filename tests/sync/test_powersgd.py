"""PowerSGD: ranks stay alike, what is not applied is kept, and every engine's timing gives the same bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import GradientPool, PowerSgdSync
from imagenet_fast.sync.powersgd import _each_orthonormal, matrix_shape
from tests.conftest import tiers
from tests.ranks import run, with_ranks
from tests.sync import given
from tests.sync.given import Given, Gradients, mean_over_ranks, pooled, same_on_ranks
from tests.sync.loops import unmeasured

SHAPES = [(12, 3, 3, 3), (12,), (40, 30), (30, 40), (), (1, 50), (64, 9)]
COMPRESSED = (0, 2, 3, 6)
LAYERS = [[shape] for shape in SHAPES]


def settings(**changes: object) -> PowerSgdSync:
    return PowerSgdSync.model_validate(
        {"wire": "fp32", "rank": 2, "bucket_mb": 0.0, "collective": "pairwise", **changes}
    )


def started(layers: Any = LAYERS, dtype: torch.dtype = torch.float32, **changes: object) -> tuple[Given, Any]:
    model = Given(*layers).to(dtype)
    return model, pooled(model, settings(**changes))


def drawn(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return given.normals(SHAPES, step, rank, dtype)


def moved(pool: GradientPool, model: Given, gradients: Gradients) -> list[Tensor | None]:
    """What a step updates the layers with, in memory's order."""
    seen, _ = given.applied(pool, model, gradients)
    return [in_memory_order(seen[param]) if param in seen else None for param in model.weights]


def in_memory_order(values: Tensor) -> Tensor:
    return values.as_strided((values.numel(),), (1,))


def kept(pool: GradientPool, which: str) -> dict[int, Tensor]:
    """Errors, or Q, by layer."""
    everything = pool.engine.state_dict()["kept"]
    return {int(name.split(".")[1]): own[which] for name, own in everything.items()}


def alike(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """To the bit."""
    pairs = zip(some, others, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


MATRICES = [
    (torch.ones(8, 3, 5, 5), (8, 75)), (torch.ones(8, 3, 5, 5).to(memory_format=torch.channels_last), (8, 75)),
    (torch.ones(6, 4).T, (6, 4)), (torch.ones(1, 5, 7), (5, 7)), (torch.ones(5, 1), (5, 1)), (torch.ones(()), (1, 1)),
    (torch.ones(0, 3), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("values", "shape"), MATRICES)
def test_a_parameter_is_the_matrix_that_it_is_in_memory(values: Tensor, shape: tuple[int, int]):
    assert matrix_shape(nn.Parameter(values)) == shape


SIZES = [(40, 30), (1, 40, 30), (12, 3, 3, 3), (3, 9), (4, 4), (1, 50), (50,), ()]


def sent_by(forward: nn.Module, sync: Any, shape: tuple[int, ...]) -> float:
    """Values of fp32 that a rank of two sends once: half of all, and half of all means."""
    _, stats = given.applied(sync, forward, given.normals([shape], 0, dist.get_rank()))
    return stats.sent_bytes / 4


@with_ranks(2)
@unmeasured()
def test_settings_say_how_many_values_the_engine_sends() -> None:
    """Beside them whether they have been used; and every message is even."""
    for shape in SIZES:
        model, pool = started([[shape]], timing="allreduce")
        assert 0 <= sent_by(model, pool, shape) - 1 - settings().values_sent(shape) <= 2, shape


@with_ranks(2)
@unmeasured()
def test_dense_epochs_send_all() -> None:
    """And then as little as ever."""
    model, pool = started([[(40, 30)]], dense_epochs=3)
    sent = [sent_by(model, pool, (40, 30)) for _ in range(6)]
    assert min(sent[:3]) >= 1200 > 5 * max(sent[3:])


@pytest.mark.parametrize("timings", tiers(["lazy and dear"], ["hybrid and dear"]))
def test_what_is_not_applied_is_kept_and_timing_changes_no_bit(timings: str):
    results = [result for timing in timings.split(" and ") for result in run(3, _conserves, timing)]
    for steps in results:
        assert all(alike(one, other) for one, other in zip(results[0], steps, strict=True))


@unmeasured()
def _conserves(timing: str) -> list[list[Tensor | None]]:
    """In one step nobody uses a layer, in another a single rank uses it."""
    model, pool = started(dtype=torch.float64, timing=timing)
    residuals = {number: torch.zeros(math.prod(SHAPES[number]), dtype=torch.float64) for number in COMPRESSED}
    steps = []
    for step in range(6):
        gradients: list[Tensor | None] = [*drawn(step, dist.get_rank(), torch.float64)]
        if step == 3 or (step == 4 and dist.get_rank() != 1):
            gradients[2] = None
        steps.append(moved(pool, model, gradients))
        errors = {number: mean_over_ranks(error).view(-1) for number, error in kept(pool, "error").items()}
        assert errors.keys() == set(COMPRESSED)
        for number, (param, gradient, result) in enumerate(zip(model.weights, gradients, steps[-1], strict=True)):
            own = torch.zeros_like(param) if gradient is None else param.detach() * 0 + gradient
            came = mean_over_ranks(in_memory_order(own))
            if (step, number) == (3, 2):
                assert result is None
                assert torch.equal(errors[2], residuals[2])
            elif number in COMPRESSED:
                torch.testing.assert_close(result + errors[number], came + residuals[number])
                assert not torch.allclose(result, came), "it is an approximation"
            else:
                torch.testing.assert_close(result, came)
        residuals = errors
    return steps


LOW_RANK = [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]


@pytest.mark.parametrize(("dtype", "near"), LOW_RANK)
@with_ranks(2)
@unmeasured()
def test_a_mean_of_low_rank_is_recovered_and_nothing_is_kept_of_it(dtype: torch.dtype, near: float) -> None:
    """Of rank 2 over both ranks together; 1 is what the rank 2 of the setting leaves room for, 0 is none."""
    shape = (40, 30)
    model, pool = started([[shape]], dtype, timing="allreduce")
    for step, rank in enumerate((1,) if dtype == torch.bfloat16 else (1, 0, 1, 0, 0, 1)):
        left, right = given.normals([(size, rank) for size in shape], step + 1, dist.get_rank(), torch.float64)
        gradient = (left @ right.T).to(dtype)
        (result,) = moved(pool, model, [gradient])
        expected = mean_over_ranks(gradient.double()).view(-1)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=near * max(1.0, float(expected.max())))
        assert kept(pool, "q")[0].dtype == (dtype if dtype != torch.bfloat16 else torch.float32)


@pytest.mark.parametrize("world", [1, 2])
@with_ranks()
@unmeasured()
def test_directions_along_which_nothing_comes_are_not_lost(world: int) -> None:
    """At first nothing comes, then only to the last row and column, which an identity would not see."""
    model, pool = started([[(40, 30)]])
    for step in range(6):
        gradient = torch.zeros(40, 30)
        if step >= 3:
            gradient[-1, -1] = 2.0
        (result,) = moved(pool, model, [gradient])
        torch.testing.assert_close(result, gradient.view(-1), rtol=0, atol=1e-5)


POISONS = product(("lazy", "dear"), (math.nan, math.inf, 1e38))


@pytest.mark.parametrize(("timing", "value"), tiers([("lazy", math.inf), ("dear", 1e38)], POISONS))
@with_ranks(2)
@unmeasured()
def test_nonfinite_reaches_every_rank_and_stays_out_of_the_residual(timing: str, value: float) -> None:
    model, pool = started(timing=timing, wire="fp16" if value == 1e38 else "fp32")
    for step in range(6):
        gradients = drawn(step, dist.get_rank())
        before = kept(pool, "error"), kept(pool, "q")
        if step == 3 and dist.get_rank() == 1:
            gradients[2][7, 3] = value
        result = moved(pool, model, gradients)
        if step == 3:
            poisoned = result.pop(2)
            assert poisoned.isnan().all()
            assert alike([before[0][2], before[1][2]], [kept(pool, "error")[2], kept(pool, "q")[2]])
        same_on_ranks(*(values for values in result if values is not None))


@with_ranks(2)
@unmeasured()
def test_it_goes_on_with_shards_of_another_size() -> None:
    model, chosen = Given([(8, 8)], [(8, 8)]), settings(rank=1)
    shapes = [(8, 8)] * 2
    pool = pooled(model, chosen)
    for step in range(3):
        given.applied(pool, model, given.normals(shapes, step, dist.get_rank()))
    state = copy.deepcopy(pool.state_dict())
    assert state["engine"]["kept"]
    for own in state["engine"]["kept"].values():  # as of layers twice as large, of which this is a shard now
        own["error"] = own["error"].repeat(2, 1)
    pool.close()
    again = pooled(model, chosen)
    again.load_state_dict(state)
    for step in range(3):
        seen, _ = given.applied(again, model, given.normals(shapes, step, dist.get_rank()))
        assert all(values.isfinite().all() for values in seen.values())


def test_matrices_made_orthonormal_together_are_those_made_so_alone():
    matrices = [torch.randn(rows, 3) for rows in (8, 5, 8, 8, 5)]
    together = _each_orthonormal(matrices)
    assert all(torch.equal(q, torch.linalg.qr(m).Q) for q, m in zip(together, matrices, strict=True))
