"""A pipeline trains as one process does that accumulates over the same micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast.distributed.groups import end_group, new_group
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.models.stages import LocalStages, split_model
from imagenet_fast.parallel.parallelize import join_stages
from imagenet_fast.parallel.pipeline_parallel import Pass, Pipeline
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.parallel_config import chunks_of
from imagenet_fast.sync import GradientPool, ParamSlot, SyncEngine, SyncStats
from imagenet_fast.training.optimizers import build_optimizer
from tests.conftest import tiers
from tests.ranks import with_ranks

SGD = Sgd(kind="sgd", lr=0.01, weight_decay=1e-4)
PIXELS, MICRO = 15, 4


def convnet() -> nn.Module:
    """Six pieces, with batch norms and operations in place; smooth, so that rounding flips no ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
        nn.SiLU(inplace=True), nn.Sequential(nn.Conv2d(16, 16, 3), nn.SiLU(inplace=True), nn.Flatten()),
        nn.Linear(16 * 9, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def batch(step: int, micro_batches: int) -> tuple[Tensor, Tensor]:
    generator, count = torch.Generator().manual_seed(step), micro_batches * MICRO
    images, labels = torch.randn(count, 3, PIXELS, PIXELS, generator=generator), torch.arange(count) % 10
    return images.contiguous(memory_format=torch.channels_last), labels


def part_of(schedule: str, cast: AbstractContextManager[object] = nullcontext()) -> LocalStages:  # noqa: B008
    """This rank's stages."""
    images = torch.empty(MICRO, 3, PIXELS, PIXELS, device="meta", memory_format=torch.channels_last)
    with cast:
        return split_model(convnet(), images, dist.get_rank(), dist.get_world_size(), chunks_of(schedule))


FIRST = [(2, "1f1b", 3, False), (2, "gpipe", 4, False), (2, "interleaved", 4, False)]
CAST = [(2, schedule, 4, True) for schedule in ("gpipe", "1f1b", "interleaved")]


@pytest.mark.parametrize(
    ("world", "schedule", "micro_batches", "cast"), tiers(FIRST, [(4, "1f1b", 9, False), (4, "gpipe", 1, False), *CAST])
)
@with_ranks()
def test_stages_follow_one_process_that_accumulates(world: int, schedule: str, micro_batches: int, cast: bool) -> None:
    """With engines, replicas and other networks: ``test_following.py``."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=cast)
    near = 1e-2 if cast else 1e-5
    model, part = convnet(), part_of(schedule, autocast)
    optimizers = [build_optimizer(SGD, one) for one in (model, part)]
    pipeline = Pipeline(part, None, schedule, micro_batches, F.cross_entropy, cast=autocast)
    statistics = StepStatistics(model, micro_batches)
    for step in range(5):
        images, labels = batch(step, micro_batches)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = 0.0
        statistics.begin()
        for some, their_labels in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            with statistics.micro_step():
                with autocast:
                    loss = F.cross_entropy(model(some), their_labels) / micro_batches
                loss.backward()
            whole += loss.item()
        assert pipeline(images, labels).item() == pytest.approx(whole, rel=near)
        if step == 0:
            gradients, expected = ({n: p.grad for n, p in one.named_parameters()} for one in (part, model))
            assert_near(gradients, expected, near)
        for optimizer in optimizers:
            optimizer.step()
    state = join_stages(part, convnet().to("meta"), dist.group.WORLD).state_dict()
    assert list(state) == list(model.state_dict()), "names and their order are those of the whole"
    assert_near(state, model.state_dict(), near, least=1e-3)


def assert_near(some: dict[str, Tensor], others: dict[str, Tensor], tolerance: float, least: float = 0.0) -> None:
    """Relative to the largest value. One below ``least`` counts as that: biases that have moved by 4e-6 from zero
    are sums of steps that cancel out, and depend on the CPU's kernels."""
    for name, value in some.items():
        far = (value - others[name]).abs().max().item()
        assert far <= tolerance * max(least, others[name].abs().max().item()), f"{name} is {far} away"


class Noting(SyncEngine):
    """Notes in which pass a slot left."""

    def __init__(self) -> None:
        self.passes: list[tuple[Pass, int]] = []
        self.left: list[int] = []

    @contextmanager
    def observe(self, which: Pass, stage: int) -> Iterator[None]:
        self.passes.append((which, stage))
        yield

    def gradient_ready(self, slot: ParamSlot) -> None:
        self.left.append(len(self.passes))

    def finish(self) -> SyncStats:
        return SyncStats(None)


@with_ranks(2)
def test_pipeline_sends_in_the_last_backward_only() -> None:
    part = part_of("1f1b")
    alone, engine = new_group(torch.device("cpu"), [dist.get_rank()]), Noting()
    pool = GradientPool(part, lambda _: engine, alone)
    pipeline = Pipeline(part, None, "1f1b", 3, F.cross_entropy, pool, observe=engine.observe)
    pool.zero_grad()
    with pool.no_sync():
        pipeline(*batch(0, 3))
    assert not engine.left
    engine.passes.clear()
    pipeline(*batch(1, 3))
    last = max(number for number, (which, _) in enumerate(engine.passes, 1) if which == "backward")
    assert set(engine.left) == {last}
    pool.end_backward()
    pool.close()
    end_group(alone)


@with_ranks(2)
def test_a_scale_multiplies_gradients_and_not_the_loss() -> None:
    part, gradients, losses = part_of("gpipe"), [], []
    pipeline = Pipeline(part, None, "gpipe", 2, F.cross_entropy)
    for scale in (None, lambda loss: 8 * loss):
        part.zero_grad()
        losses.append(pipeline(*batch(0, 2), scale).item())
        gradients.append([p.grad for p in part.parameters() if p.grad is not None])
    assert losses[0] == losses[1]
    assert all(torch.equal(8 * a, b) for a, b in zip(*gradients, strict=True))
