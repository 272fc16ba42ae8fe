"""Images mixed with one another; bytes that become what a network reads, by torchvision's rule."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from imagenet_fast.data.device import Mixer, Normalizer
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData
from tests.data.small import same

CLASSES = 7


def order_of(ranks: int, rank: int, seed: int = 1, first_step: int = 0) -> TrainSampler:
    """Micro-batches of 6, four of them a step."""
    return TrainSampler(48, Batching(ranks, 6, 4 // ranks), rank, seed, first_step)


def batches(order: TrainSampler, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Of two epochs: image n is n everywhere, of class n mod 7."""
    made = []
    for indices in islice(order, 4 * order.batching.accumulation):
        numbers = torch.from_numpy(indices.images)
        images = numbers.to(dtype)[:, None, None, None].expand(-1, 3, 8, 10)
        made.append((images.contiguous(memory_format=torch.channels_last), numbers % CLASSES))
    return made


def mixed(order: TrainSampler, mixup: float, cutmix: float, dtype=torch.float32) -> list[tuple[Tensor, Tensor]]:
    mix = Mixer(order.seed, CLASSES, mixup, cutmix)
    return [
        mix(images, labels, indices) for indices, (images, labels) in zip(order, batches(order, dtype), strict=False)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_an_images_label_says_what_it_shows(mixup: float, cutmix: float, dtype: torch.dtype):
    order = order_of(1, 0)
    changed = 0
    for (before, classes), (images, labels) in zip(batches(order), mixed(order, mixup, cutmix, dtype), strict=True):
        assert (images.dtype, images.shape, labels.shape) == (dtype, before.shape, (6, CLASSES))
        assert images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(labels.sum(1), torch.ones(6))
        shares = labels.gather(1, classes[:, None])[:, 0]
        others = before.roll(1, 0)
        shown = images.float().mean((1, 2, 3))
        expected = shares * before[:, 0, 0, 0] + (1 - shares) * others[:, 0, 0, 0]
        apart = classes != classes.roll(1)  # where both are of one class its share is 1 whatever is shown
        torch.testing.assert_close(shown[apart], expected[apart], rtol=2e-2, atol=2e-2)
        changed += bool((images.float() != before).any())
    assert changed > 8


def test_mixup_draws_are_independent_of_ranks_and_history():
    whole = mixed(order_of(1, 0), 0.2, 1.0)
    first, second = mixed(order_of(2, 0), 0.2, 1.0), mixed(order_of(2, 1), 0.2, 1.0)
    assert same(whole, [part for n in range(0, 8, 2) for part in first[n : n + 2] + second[n : n + 2]])
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    assert same(whole[8:], mixed(order_of(1, 0, first_step=2), 0.2, 1.0)[:8])
    assert torch.equal(torch.rand(4), expected), "the model's generator is left alone"


DATA = ImageData(dataset="imagenet", loader="threads", image_size=13, resize=13)
CPU = torch.device("cpu")


def some_images(count: int, size: int) -> Tensor:
    """Every byte among them, as loaders lay them out."""
    return (
        (torch.arange(count * size * size * 3).reshape(count, size, size, 3) % 256).to(torch.uint8).permute(0, 3, 1, 2)
    )


def normalised(source: Tensor, dtype: torch.dtype) -> Tensor:
    return Normalizer(DATA, CPU, dtype)(source)


def torchvisions(images: Tensor) -> Tensor:
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(DATA.mean, DATA.std)])(images)


@pytest.mark.parametrize("count", [1, 2, 700])
def test_images_are_normalised_as_torchvision_does(count: int):
    """Also a batch of more values than are turned at once, which is no multiple of it."""
    source = some_images(count, 13)
    images = normalised(source, torch.float32)
    assert torch.allclose(images, torchvisions(source), rtol=0, atol=1e-6)
    assert images.stride() == source.stride()


def test_fewer_bits_are_rounded_once_and_another_layout_is_taken_too():
    source = some_images(3, 13)
    expected = normalised(source, torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        images = normalised(source.contiguous() if dtype == torch.float32 else source, dtype)
        assert images.dtype == dtype
        assert torch.equal(images, expected.to(dtype))
