"""Accuracy: exact counts for any number of ranks, from one model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tests
from imagenet_fast.data.build import Loaders, build_loaders, build_val_loader
from imagenet_fast.metrics.events import read_events
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.run.result import Accuracy
from imagenet_fast.training.evaluation import StopRequested, evaluate, mirrored_logits, shifted_logits
from tests.data.small import image_data, with_bad_images
from tests.e2e.command import train_here
from tests.ranks import run, with_ranks
from tests.training.jobs import job_of

CPU = torch.device("cpu")


class Guess(nn.Module):
    """Ranks classes by the first ten values, of equal ones the first class first; knows nothing of labels."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :10] - 1e-3 * torch.arange(10)


EXACT = torch.autocast("cpu", enabled=False)


def pixels(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(256, (256, 4, 4, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)[:count]


def data_of(images: int, micro: int) -> Loaders:
    """On this rank, of the images of ``pixels``."""
    data = SyntheticData(loader="synthetic", image_size=4, train_images=100, val_images=images, classes=10)
    world = tests.world()
    return build_loaders(data, None, Batching(world.size, micro, 1), world.rank, 2, CPU, seed=5)


@pytest.mark.parametrize("world", [1, 3])
def test_bad_images_are_counted(world: int, image_dir: Path, tmp_path: Path):
    """They count as wrong, whoever reads them; where there is none, nothing is recorded."""
    damaged = with_bad_images(image_dir, tmp_path / "damaged")
    (damaged / "val/class2/006.jpg").write_bytes(b"")
    assert run(world, _bad_images, damaged) == [2] * world
    assert run(world, _bad_images, image_dir) == [None] * world


def _bad_images(root: Path) -> int | None:
    world, data = tests.world(), image_data(on_bad_image="skip")
    dataset = build_val_loader(data, root, Batching(world.size, 2, 1), world.rank, 1, CPU, seed=1)
    return evaluate(Guess(), dataset, EXACT, world).bad_images


@with_ranks(1)
def test_a_run_records_bad_images_beside_its_accuracy(image_dir: Path, tmp_path: Path) -> None:
    root = with_bad_images(image_dir, tmp_path / "damaged")
    data = image_data(on_bad_image="skip", image_size=32, resize=32).model_dump()
    job = job_of(tmp_path / "run", root, reference_ranks=1, global_batch=20, epochs=1, data=data)
    assert train_here(job).bad_images == 1
    assert json.loads((tmp_path / "run/outcome.json").read_text())["bad_images"] == 1
    assert [event["bad_images"] for event in read_events(tmp_path / "run") if event["event"] == "eval"] == [1]


CASES = [(images, micro) for images in (1, 2, 5, 37) for micro in (1, 8)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@with_ranks()
def test_every_image_counts_once(world: int):
    """Also in a second evaluation."""
    for images, micro in CASES:
        dataset, model = data_of(images, micro), Guess().train()
        for _ in range(2):
            assert evaluate(model, dataset, EXACT, tests.world()) == by_hand(images)
            assert model.training


def by_hand(images: int = 37) -> Accuracy:
    """Counted from the images themselves."""
    order = [image.flatten()[:10].argsort(descending=True, stable=True).tolist() for image in pixels(images)]
    top1 = sum(guesses[0] == i % 10 for i, guesses in enumerate(order))
    top5 = sum(i % 10 in guesses[:5] for i, guesses in enumerate(order))
    return Accuracy(top1=100 * top1 / images, top5=100 * top5 / images, images=images)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
@with_ranks()
def test_views_of_an_image_are_averaged_beside_the_plain_figure(world: int, shift: int):
    """It and its mirror image, or six views weighed one by one; pixels beyond an edge are found by reflected index."""
    mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in (SyntheticData.mean, SyntheticData.std))
    images = (pixels(37).numpy() / 255 - mean) / std

    def logits(moved: int) -> np.ndarray:
        """The mean of the images moved so far and of their mirror images."""
        rows = [3 - abs(3 - abs(pixel + moved)) for pixel in range(4)]
        view = images[:, :, rows][:, :, :, rows]
        return sum(side.reshape(37, -1)[:, :10] - 1e-3 * np.arange(10) for side in (view, view[:, :, :, ::-1])) / 2

    def figures(logits: np.ndarray) -> list[float]:
        guesses = np.argsort(-logits, axis=1)
        return [100 * np.mean((guesses[:, :k] == np.arange(37)[:, None] % 10).any(axis=1)) for k in (1, 5)]

    plain, mirrored = by_hand(), figures(logits(0))
    shifted = figures(logits(0) / 2 + logits(-2) / 4 + logits(2) / 4)
    assert shifted != mirrored != [plain.top1, plain.top5]
    accuracy = evaluate(Guess(), data_of(37, 8), EXACT, tests.world(), mirror=True, shift=shift)
    assert (accuracy.top1, accuracy.top5) == (plain.top1, plain.top5)
    assert [accuracy.top1_mirror, accuracy.top5_mirror] == pytest.approx(mirrored)
    assert not shift or [accuracy.top1_shift, accuracy.top5_shift] == pytest.approx(shifted)


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
@with_ranks()
def test_a_stop_that_one_rank_hears_of_cuts_an_evaluation_off_on_all(world: int):
    """Rank 0, before its second batch."""
    here, dataset, model, answers = tests.world(), data_of(60, 2), Guess().train(), iter([False, True])
    with pytest.raises(StopRequested):
        evaluate(model, dataset, EXACT, here, lambda: here.is_main and next(answers))
    assert model.training
    assert len(list(answers)) == (0 if here.is_main else 2)
    assert evaluate(model, dataset, EXACT, here).images == 60, "the next one is whole"


@pytest.mark.parametrize("training", [True, False])
@with_ranks(2)
def test_layers_that_were_frozen_stay_frozen(training: bool):
    """A network may hold norms whose statistics are not to move, in eval mode while the rest trains."""
    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Sequential(Guess()))
    model[1].eval()
    model.training = training
    evaluate(model, data_of(10, 4), EXACT, tests.world())
    assert [layer.training for layer in (model, *model)] == [training, True, False, True]


class Caching(Guess):
    """Keeps what it adds, as networks with positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.grid = nn.Parameter(torch.ones(1)), None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.grid = torch.linspace(0, 1, 10) if self.grid is None else self.grid
        return super().forward(images) + self.scale * self.grid


@with_ranks(2)
def test_what_a_network_keeps_of_an_evaluation_can_be_trained_with():
    model = Caching()
    evaluate(model, data_of(5, 2), EXACT, tests.world())
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    assert model.scale.grad is not None
