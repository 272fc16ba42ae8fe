"""Batch-norm statistics: the same on any number of ranks, and those of one step over all its micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tests
from imagenet_fast.data.build import build_loaders
from imagenet_fast.distributed.reductions import average_batch_norms
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.training_step import build_step
from tests.ranks import run
from tests.training.jobs import job_of


def test_one_two_and_four_ranks_have_the_same_after_one_step():
    (alone,), (both, _), (four, *_) = (run(ranks, _after_one_step) for ranks in (1, 2, 4))
    assert len(alone) == 3 * 6, "mean, variance and count of each norm"
    for name, expected in alone.items():
        for other in (both, four):
            torch.testing.assert_close(other[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def _after_one_step() -> dict[str, Tensor]:
    """A global batch of 4 micro-batches, without augmentation; the buffers that an evaluation would see."""
    world, job = tests.world(), job_of(reference_ranks=4, global_batch=16, sync={"kind": "lazy", "wire": "fp32"})
    dataset = build_loaders(job.recipe.data, None, job.batching, world.rank, 1, world.device, job.recipe.seed)
    network = build_initial_model(job.recipe, dataset.classes, world)
    take_step = build_step(job.recipe, job.batching, network, world, steps_per_epoch=4)
    take_step(dataset.train, lr=0.1)
    take_step.state.sync.close()
    average_batch_norms(network)
    return dict(network.named_buffers())


class Twice(nn.Module):
    """One norm that is called twice in a forward."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(2 * self.norm(x) + 1)
        return out


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("micro_steps", [1, 2, 5])
@pytest.mark.parametrize("piped", [False, True])
def test_micro_steps_leave_the_mean_of_what_each_would_have_left(momentum: float | None, micro_steps: int, piped: bool):
    """Whatever a norm's momentum, and however often a forward calls it: as if each were a rank of its own. In a
    pipeline backwards follow when other forwards have run. A frozen norm stays as it is to the bit."""
    model = nn.Sequential(Twice(momentum), nn.BatchNorm1d(3)).double()
    model[1].eval().running_var.fill_(1 / 3)
    statistics = StepStatistics(model, micro_steps)
    for _ in range(3):
        batches = torch.randn(micro_steps, 8, 3, dtype=torch.float64)
        before = copy.deepcopy(model)
        left, losses = [], []
        statistics.begin()
        for batch in batches:
            by_itself = copy.deepcopy(before)
            by_itself(batch)
            left.append(dict(by_itself.named_buffers()))
            with statistics.micro_step():
                loss = model(batch).square().sum()
                losses.append(loss) if piped else loss.backward()
        for loss in losses:
            loss.backward()
        for name, buffer in model.named_buffers():
            mean = torch.stack([one[name] for one in left]).double().mean(0)
            torch.testing.assert_close(buffer.double(), mean, rtol=1e-12, atol=1e-12)
        assert model[1].running_var.eq(1 / 3).all()


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("micro_steps", "cut_off"), [(3, 1), (3, 2), (3, 2.5), (1, 0.5)])
def test_a_step_that_was_cut_off_or_is_skipped_leaves_no_trace(micro_steps: int, cut_off: float, skipped: bool):
    """2.5: it ends in the third forward, when its first norm has moved."""
    layers = nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.ReLU(), nn.BatchNorm1d(3))
    statistics = StepStatistics(layers, micro_steps, skips=True)

    def step(batch: Tensor, found_inf: float, ends: float = micro_steps) -> None:
        statistics.begin()
        for _ in range(int(ends)):
            with statistics.micro_step():
                layers(batch)
        if ends % 1:
            with pytest.raises(RuntimeError, match="mat1 and mat2"), statistics.micro_step():
                nn.Sequential(layers[0], nn.Linear(4, 4))(batch)
        if ends == micro_steps:
            statistics.end(torch.tensor(found_inf))

    step(torch.randn(8, 3), 0.0)
    kept = {name: buffer.clone() for name, buffer in layers.named_buffers()}
    assert kept["0.num_batches_tracked"] == 1
    step(torch.full((8, 3), torch.inf), 1.0, micro_steps if skipped else cut_off)
    statistics.begin()
    assert all(torch.equal(buffer, kept[name]) for name, buffer in layers.named_buffers())
