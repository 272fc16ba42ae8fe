"""A pipeline trains as one process does that accumulates over the same micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast import sync
from imagenet_fast.distributed.process_groups import end_group, new_group
from imagenet_fast.errors import UserError
from imagenet_fast.models import build_model
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.models.stages import LocalStages, split_model
from imagenet_fast.parallel.parallelize import join_stages
from imagenet_fast.parallel.pipeline_parallel import Pass, Pipeline
from imagenet_fast.recipe import optim_config, schema
from imagenet_fast.recipe.parallel_config import chunks_of, misfit
from imagenet_fast.sync import EngineSettings, GradientPool, ParamSlot, SyncEngine, SyncStats, build_engine
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.given import with_ranks

SGD = optim_config.Sgd(kind="sgd", lr=0.01, weight_decay=1e-4)
LAZY = sync.LazySync(wire="fp32", threshold_mb=0.01)


def convnet() -> nn.Module:
    """Six pieces, with batch norms and operations in place; smooth, so that rounding flips no ReLU."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
        nn.SiLU(inplace=True), nn.Sequential(nn.Conv2d(16, 16, 3), nn.SiLU(inplace=True), nn.Flatten()),
        nn.Linear(16 * 9, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    return build_model(schema.ResNet(kind="resnet18"), 10)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    size: int
    """Pixels."""
    schedule: str
    micro_batches: int
    micro: int = 4
    """Images of one."""
    engine: EngineSettings = LAZY
    cast: bool = False
    lr: float = 0.01
    steps: int = 5

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(memory_format=torch.channels_last)

    def batch(self, step: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Of all replicas."""
        source, generator = replicas * self.micro_batches * self.micro, torch.Generator().manual_seed(step)
        images = torch.randn(source, 3, self.size, self.size, generator=generator)
        labels = torch.randint(0, 10, (source,), generator=generator)
        return images.contiguous(memory_format=torch.channels_last), labels

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if self.cast else nullcontext()


@dataclass
class Trained:
    losses: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    state: dict[str, Tensor]


def accumulated(case: Case, replicas: int) -> Trained:
    """One process, a micro-batch after the other."""
    model = case.model()
    optimizer, count = build_optimizer(SGD.model_copy(update={"lr": case.lr}), model), replicas * case.micro_batches
    statistics, losses, gradients = StepStatistics(model, count), [], dict[str, Tensor]()
    for step in range(case.steps):
        model.zero_grad()
        losses.append(0.0)
        for images, labels in zip(*(t.chunk(count) for t in case.batch(step, replicas)), strict=True):
            with statistics.micro_step():
                with case.autocast():
                    loss = F.cross_entropy(model(images), labels) / count
                loss.backward()
            losses[-1] += loss.item()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Trained(losses, gradients, model.state_dict())


def piped(case: Case, stages: int) -> Trained:
    """On each rank. What of a state differs between replicas, the statistics, is their mean."""
    replicas, rank = dist.get_world_size() // stages, dist.get_rank()
    place = rank % replicas
    pp = new_group(torch.device("cpu"), range(place, stages * replicas, replicas))
    dp = new_group(torch.device("cpu"), range(rank - place, rank - place + replicas))
    part = part_of(case, pp)
    pool = GradientPool(part, dp)
    pool.attach(build_engine(case.engine, pool))
    optimizer = build_optimizer(SGD.model_copy(update={"lr": case.lr}), part)
    pipeline = Pipeline(part, pp, case.schedule, case.micro_batches, F.cross_entropy, pool, case.autocast())
    losses, gradients = [], dict[str, Tensor]()
    for step in range(case.steps):
        images, labels = (t.chunk(dp.size())[dp.rank()] for t in case.batch(step, dp.size()))
        pool.zero_grad()
        loss = pipeline(images, labels)
        pool.end_backward()
        if not gradients and not case.engine.defers:
            gradients = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
        pool.step(optimizer)
        dist.all_reduce(loss, group=dp)
        losses.append(loss.item() / dp.size())
    state = join_stages(part, case.model().to("meta"), pp).state_dict()
    pool.close()
    for value in state.values():
        if value.is_floating_point():
            dist.all_reduce(value.div_(dp.size()), group=dp)
    for group in (pp, dp):
        end_group(group)
    return Trained(losses, gradients, state if rank == 0 else {})


def part_of(case: Case, group: dist.ProcessGroup) -> LocalStages:
    images = torch.empty(case.micro, 3, case.size, case.size, device="meta", memory_format=torch.channels_last)
    with case.autocast():
        return split_model(case.model(), images, group.rank(), group.size(), chunks_of(case.schedule))


HYBRID = sync.HybridSync(wire="fp32", fuse_mb=0.001)
CASES: dict[str, tuple[int, int, Case]] = {
    "2-1f1b": (2, 2, Case(convnet, 15, "1f1b", 3)),
    "2-gpipe": (2, 2, Case(convnet, 15, "gpipe", 4)),
    "2-interleaved": (2, 2, Case(convnet, 15, "interleaved", 4)),
    "2-1f1b-resnet18": (2, 2, Case(resnet18, 96, "1f1b", 2, lr=1e-5)),
    "4-1f1b": (4, 4, Case(convnet, 15, "1f1b", 9)),
    "4-gpipe-one": (4, 4, Case(convnet, 15, "gpipe", 1)),
    "4-interleaved-resnet18": (4, 4, Case(resnet18, 96, "interleaved", 3, lr=1e-5)),
    # At this rate one process follows itself in whatever order it takes its micro-batches; at 0.01 it does not.
    "replicas-resnet18": (4, 2, Case(resnet18, 96, "1f1b", 2, micro=2, lr=1e-5)),
    "replicas-hybrid": (4, 2, Case(convnet, 15, "interleaved", 4, engine=HYBRID)),
    # It chooses after seven steps.
    "replicas-auto": (4, 2, Case(convnet, 15, "1f1b", 2, engine=sync.AutoSync(wire="fp32"), lr=1e-3, steps=12)),
    **{f"2-{kind}-cast": (2, 2, Case(convnet, 15, kind, 4, cast=True)) for kind in ("gpipe", "1f1b", "interleaved")},
}  # fmt: skip
"""Ranks, stages, and what they train."""
AT_FIRST = ("2-1f1b", "2-gpipe", "2-interleaved", "replicas-hybrid")


@pytest.mark.parametrize("name", [pytest.param(c, marks=() if c in AT_FIRST else pytest.mark.ci) for c in CASES])
def test_stages_follow_one_process_that_accumulates(name: str):
    world, stages, case = CASES[name]
    tolerance = 1e-2 if case.cast else 5e-5 if world > stages else 1e-5
    ranks, expected = run(world, piped, case, stages), accumulated(case, world // stages)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=tolerance)
    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    if not case.engine.defers:
        assert gradients.keys() == expected.gradients.keys()
        assert_near(gradients, expected.gradients, tolerance)
    assert list(ranks[0].state) == list(expected.state), "names and their order are those of the whole"
    assert_near(ranks[0].state, expected.state, tolerance, least=1e-3)


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

    def finish(self, drop: bool = False) -> SyncStats:
        return SyncStats(None)


@with_ranks(2)
def test_pipeline_sends_in_the_last_backward_only() -> None:
    case = Case(convnet, 15, "1f1b", 3)
    part = part_of(case, dist.group.WORLD)
    alone, engine = new_group(torch.device("cpu"), [dist.get_rank()]), Noting()
    pool = GradientPool(part, alone)
    pool.attach(engine)
    pipeline = Pipeline(part, None, case.schedule, 3, F.cross_entropy, pool, observe=engine.observe)
    pool.zero_grad()
    with pool.no_sync():
        pipeline(*case.batch(0, 1))
    assert not engine.left
    engine.passes.clear()
    pipeline(*case.batch(1, 1))
    last = max(number for number, (which, _) in enumerate(engine.passes, 1) if which == "backward")
    assert set(engine.left) == {last}
    pool.end_backward()
    pool.close()
    end_group(alone)


@with_ranks(2)
def test_a_scale_multiplies_gradients_and_not_the_loss() -> None:
    case, gradients, losses = Case(convnet, 15, "gpipe", 2), [], []
    part = part_of(case, dist.group.WORLD)
    pipeline = Pipeline(part, None, case.schedule, 2, F.cross_entropy)
    for scale in (None, lambda loss: 8 * loss):
        part.zero_grad()
        losses.append(pipeline(*case.batch(0, 1), scale).item())
        gradients.append([p.grad for p in part.parameters() if p.grad is not None])
    assert losses[0] == losses[1]
    assert all(torch.equal(8 * a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "said"),
    [
        ("1f1b", 4, 3, "1f1b has a micro-batch for each of 4 stages at least, and 3 are fewer; raise"),
        ("interleaved", 4, 9, "in equal rounds, and 9 do not make 2; take a multiple of 4"),
        ("zero_bubble", 4, 8, "zero_bubble is not one of gpipe, 1f1b and interleaved; .* replicas would drift apart"),
        ("1f1b", 4, 4, None),
        ("interleaved", 4, 3, None),
        ("gpipe", 4, 1, None),
    ],
)
def test_schedules_and_micro_batches_that_do_not_go_together_are_told(
    schedule: str, ranks: int, micro_batches: int, said: str | None
):
    why = misfit(schedule, ranks, micro_batches)
    assert why is None if said is None else re.search(said, str(why))


@with_ranks(2)
def test_what_a_pipeline_cannot_do_is_refused_in_a_sentence_on_every_rank() -> None:
    case = Case(convnet, 15, "1f1b", 2)
    part = part_of(case, dist.group.WORLD)
    _, ddp = sync.attach(case.model(), sync.DdpSync())
    pipeline = Pipeline(part, None, "1f1b", 2, F.cross_entropy)
    images, labels = case.batch(0, 1)
    for attempt, sentence in (
        (
            lambda: Pipeline(part, None, "1f1b", 1, F.cross_entropy),
            "schedule 1f1b has a micro-batch for each of 2 stages at least, and 1 are fewer; raise .*, or take gpipe",
        ),
        (
            lambda: Pipeline(part, None, "1f1b", 2, F.cross_entropy, ddp),
            "the engine ddp watches the forward of a whole network, not stages; take another engine",
        ),
        (
            lambda: pipeline(images[:7], labels[:7]),
            "a batch of 7 images is not the 8 of 2 equal .* that the pipeline's ranks have agreed on; give it full",
        ),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            attempt()
