"""Bytes become what a network reads, by torchvision's rule, whatever the dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from imagenet_fast.data.normalize import Normalizer
from imagenet_fast.recipe.data_config import ImageData

DATA = ImageData(dataset="imagenet", loader="folder", image_size=13, resize=13)
CPU = torch.device("cpu")


def some_images(count: int, size: int) -> Tensor:
    """Every byte among them, as loaders lay them out."""
    return (
        (torch.arange(count * size * size * 3).reshape(count, size, size, 3) % 256).to(torch.uint8).permute(0, 3, 1, 2)
    )


def normalised(source: Tensor, dtype: torch.dtype) -> Tensor:
    labels = torch.arange(len(source))
    (images, same), *more = Normalizer([(source, labels)], DATA, CPU, dtype)
    assert not more
    assert same is labels
    return images


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
