"""Batch-norm statistics: the same on any number of ranks, and those of one step over all its micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tests
from imagenet_fast.data.build import build_loaders
from imagenet_fast.distributed.reductions import average_batch_norms
from imagenet_fast.models.batchnorm_stats import PipelinedStatistics, StepStatistics
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.train_step import build_step
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
    world, job = tests.world(), job_of(ranks=4, global_batch=16, sync={"kind": "lazy", "wire": "fp32"})
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
def test_micro_steps_leave_the_mean_of_what_each_would_have_left(momentum: float | None, micro_steps: int):
    """Whatever a norm's momentum, and however often a forward calls it: as if each were a rank of its own."""
    model = Twice(momentum).double()
    statistics = StepStatistics(model, micro_steps)
    for _ in range(3):
        batches = torch.randn(micro_steps, 8, 3, dtype=torch.float64)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        left: list[dict[str, Tensor]] = []
        for batch in batches:
            by_itself = Twice(momentum).double()
            by_itself.load_state_dict(before, strict=False)
            by_itself(batch)
            left.append(dict(by_itself.named_buffers()))
        for batch in batches:
            with statistics.micro_step():
                model(batch)
        for name, buffer in model.named_buffers():
            mean = torch.stack([one[name] for one in left]).double().mean(0)
            torch.testing.assert_close(buffer.double(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 16])
def test_a_pipelines_norm_moves_once_a_step_and_weighs_micro_batches_alike(momentum: float | None, micro_batches: int):
    """As if it had seen their mean; without a momentum each step counts as one."""
    norm = nn.BatchNorm1d(3, momentum=momentum).double()
    statistics = PipelinedStatistics([norm], micro_batches)
    batches = torch.randn(4, micro_batches, 8, 3, dtype=torch.float64) + torch.arange(4.0).view(4, 1, 1, 1)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step, batch in enumerate(batches, 1):
        statistics.begin()
        for part in batch:
            with statistics.forward():
                norm(part)
        share = momentum or 1 / step
        mean, var = mean.lerp(batch.mean((0, 1)), share), var.lerp(batch.var(1).mean(0), share)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)
    assert norm.num_batches_tracked == 4
    assert norm.momentum == momentum


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("cut_off", [1, 2, 2.5])
def test_a_step_that_was_cut_off_between_its_micro_steps_leaves_no_trace(momentum: float | None, cut_off: float):
    """In the statistics of either way to take a step; 2.5: in the third forward, when its first norm has moved."""
    torch.manual_seed(0)

    def moved(piped: bool, cut: bool) -> dict[str, Tensor]:
        layers = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            layers[1].weight.copy_(torch.eye(3))
            layers[1].bias.zero_()
        statistics: PipelinedStatistics | StepStatistics
        statistics = PipelinedStatistics([layers], 3) if piped else StepStatistics(layers, 3)
        inside = statistics.forward if isinstance(statistics, PipelinedStatistics) else statistics.micro_step
        for number in range(3):
            statistics.begin()
            for part in torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(number)):
                with inside():
                    layers(part)
            if number == 1 and cut:
                statistics.begin()
                for _ in range(int(cut_off)):
                    with inside():
                        layers(torch.ones(8, 3))
                if cut_off % 1:
                    with pytest.raises(RuntimeError, match="mat1 and mat2"), inside():
                        nn.Sequential(layers[0], nn.Linear(4, 4))(torch.ones(8, 3))
        return dict(layers.named_buffers())

    for piped in (True, False):
        for name, buffer in moved(piped, cut=False).items():
            assert torch.equal(moved(piped, cut=True)[name], buffer), (piped, name)
