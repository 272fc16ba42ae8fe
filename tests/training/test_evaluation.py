"""Accuracy: exact counts for any number of ranks, from one model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests
from imagenet_fast.data.loaders import build_loaders
from imagenet_fast.distributed.reductions import average_batch_norms
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.training.evaluation import Accuracy, Stopped, evaluate, mirrored_logits, shifted_logits
from tests.ranks import run

CPU = torch.device("cpu")


class Guess(nn.Module):
    """Ranks classes by the first ten values, of equal ones the first class first; knows nothing of labels."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :10] - 1e-3 * torch.arange(10)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_image_counts_once(world: int):
    for by_case in run(world, _accuracies):
        assert by_case == _expected()


def _cases() -> list[tuple[int, int]]:
    return [(images, micro) for images in (1, 2, 5, 37) for micro in (1, 8)]


def _accuracies() -> list[Accuracy]:
    world = tests.world(local_rank=0, local_size=1)
    results = []
    for images, micro in _cases():
        data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=images, classes=10)
        dataset = build_loaders(data, None, Batching(world.size, micro, 1), world.rank, 2, CPU, seed=5)
        model = Guess().train()
        evaluate(model, dataset, torch.autocast("cpu", enabled=False), world)
        results.append(evaluate(model, dataset, torch.autocast("cpu", enabled=False), world))
        assert model.training
    return results


def _expected() -> list[Accuracy]:
    """Counted by hand from the images themselves."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(256, (256, 4, 4, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
    results = []
    for images, _ in _cases():
        order = [p.flatten()[:10].argsort(descending=True, stable=True).tolist() for p in source[:images]]
        top1 = sum(guesses[0] == i % 10 for i, guesses in enumerate(order))
        top5 = sum(i % 10 in guesses[:5] for i, guesses in enumerate(order))
        results.append(Accuracy(100 * top1 / images, 100 * top5 / images, images))
    return results


@pytest.mark.parametrize("world", [1, 3])
def test_mirror_images_are_averaged_beside_the_plain_figure(world: int):
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(256, (256, 4, 4, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)[:37]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (SyntheticData.mean, SyntheticData.std))
    images, model = (source / 255 - mean) / std, Guess()
    logits = (model(images) + model(torch.flip(images, [3]))) / 2
    order = logits.argsort(dim=1, descending=True)
    labels = torch.arange(37)[:, None] % 10
    expected = [100 * float((order[:, :k] == labels).sum()) / 37 for k in (1, 5)]
    plain = _expected()[_cases().index((37, 8))]
    for accuracy in run(world, _mirrored):
        assert (accuracy.top1, accuracy.top5) == (plain.top1, plain.top5)
        assert [accuracy.top1_mirror, accuracy.top5_mirror] == pytest.approx(expected)
    assert expected != [plain.top1, plain.top5]


def _mirrored() -> Accuracy:
    world = tests.world(local_rank=0, local_size=1)
    data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=37, classes=10)
    dataset = build_loaders(data, None, Batching(world.size, 8, 1), world.rank, 2, CPU, seed=5)
    return evaluate(Guess(), dataset, torch.autocast("cpu", enabled=False), world, mirror=True)


@pytest.mark.parametrize("world", [1, 3])
def test_shifted_images_are_averaged_beside_the_other_figures(world: int):
    """Six views of each image, weighed one by one; pixels beyond an edge are found by their reflected index."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(256, (256, 4, 4, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)[:37]
    mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in (SyntheticData.mean, SyntheticData.std))
    images = (source.numpy() / 255 - mean) / std
    logits = np.zeros((37, 10))
    for moved, weight in ((0, 1 / 4), (-2, 1 / 8), (2, 1 / 8)):  # the weight of the view, and of its mirror image
        rows = [3 - abs(3 - abs(pixel + moved)) for pixel in range(4)]
        view = images[:, :, rows][:, :, :, rows]
        for side in (view, view[:, :, :, ::-1]):
            logits += weight * (side.reshape(37, -1)[:, :10] - 1e-3 * np.arange(10))
    guesses = np.argsort(-logits, axis=1)
    expected = [100 * np.mean((guesses[:, :k] == np.arange(37)[:, None] % 10).any(axis=1)) for k in (1, 5)]
    before = run(1, _mirrored)[0]
    for accuracy in run(world, _shifted):
        assert [accuracy.top1_shift, accuracy.top5_shift] == pytest.approx(expected)
        assert (accuracy.top1, accuracy.top5) == (before.top1, before.top5)
        assert (accuracy.top1_mirror, accuracy.top5_mirror) == (before.top1_mirror, before.top5_mirror)
    assert expected != [before.top1_mirror, before.top5_mirror]


def _shifted() -> Accuracy:
    world = tests.world(local_rank=0, local_size=1)
    data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=37, classes=10)
    dataset = build_loaders(data, None, Batching(world.size, 8, 1), world.rank, 2, CPU, seed=5)
    return evaluate(Guess(), dataset, torch.autocast("cpu", enabled=False), world, mirror=True, shift=2)


def test_logits_of_views_are_added_in_fp32():
    """257 is no number of bf16: the mean would be 128."""
    first = torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    first[..., 0], first[..., 2] = 256, 1

    class Corner(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images[:, :, 0, 0]

    model = Corner()
    both = mirrored_logits(model, first)
    assert (both.dtype, both.item()) == (torch.float32, 128.5)
    shifted = shifted_logits(model, first, both, 1)
    assert (shifted.dtype, shifted.item()) == (torch.float32, 64.25), "the corners of shifted images are 0"


@pytest.mark.parametrize("world", [1, 3])
def test_a_stop_that_one_rank_hears_of_cuts_an_evaluation_off_on_all(world: int):
    assert run(world, _looks_before_the_stop) == [2] * world


def _looks_before_the_stop() -> int:
    """Rank 0 alone is asked, before its second batch; how often it looked."""
    world = tests.world(local_rank=0, local_size=1)
    data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=60, classes=10)
    dataset = build_loaders(data, None, Batching(world.size, 2, 1), world.rank, 2, CPU, seed=5)
    model, looks = Guess().train(), 0

    def asked() -> bool:
        nonlocal looks
        looks += 1
        return looks == 2

    with pytest.raises(Stopped):
        evaluate(model, dataset, torch.autocast("cpu", enabled=False), world, asked if world.rank == 0 else never)
    assert model.training
    again = evaluate(model, dataset, torch.autocast("cpu", enabled=False), world)
    assert again.images == 60, "the next one is whole"
    return looks or 2


def never() -> bool:
    return False


def test_batch_norm_statistics_become_the_mean_over_ranks():
    for mean, var, counted in run(3, _average):
        assert mean == [1.0, 1.0]
        assert var == [2.0, 2.0]
        assert counted == 7


def _average() -> tuple[list[float], list[float], int]:
    norm = nn.BatchNorm2d(2)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.fill_(dist.get_rank())
    norm.running_var.fill_(dist.get_rank() + 1)
    norm.num_batches_tracked.fill_(7)
    average_batch_norms(nn.Sequential(norm, nn.BatchNorm1d(3, track_running_stats=False)))
    return norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_were_frozen_stay_frozen(training: bool):
    """A network may hold norms whose statistics are not to move, in eval mode while the rest trains."""
    assert run(1, _modes_around, training) == [([training, True, False, True], [training, True, False, True])]


def _modes_around(training: bool) -> tuple[list[bool], list[bool]]:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Sequential(Guess()))
    model[1].eval()
    model.training = training
    dataset = build_loaders(
        SyntheticData(loader="synthetic", image_size=16, classes=10, train_images=8, val_images=10),
        None, Batching(1, 4, 1), 0, 1, CPU, seed=1,
    )  # fmt: skip

    def modes() -> list[bool]:
        return [model.training, model[0].training, model[1].training, model[2].training]

    before = modes()
    evaluate(model, dataset, torch.autocast("cpu", enabled=False), tests.world(0, 1))
    return before, modes()


class Caching(nn.Module):
    """Keeps a grid for each size of images, as networks with positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.grids: dict[int, torch.Tensor] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        side = images.size(-1)
        if side not in self.grids:
            self.grids[side] = torch.linspace(0, 1, 10)
        return images.flatten(1)[:, :10] + self.scale * self.grids[side]


def test_what_a_network_keeps_of_an_evaluation_can_be_trained_with():
    run(1, _train_after_evaluation)


def _train_after_evaluation() -> None:
    world = tests.world(0, 1)
    data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=5, classes=10)
    dataset = build_loaders(data, None, Batching(1, 2, 1), 0, 2, CPU, seed=5)
    model = Caching()
    evaluate(model, dataset, torch.autocast("cpu", enabled=False), world)
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    assert model.scale.grad is not None
