"""Crops of the folder loader beside torchvision's of the same images, by PIL."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from imagenet_fast.data.sampler import Resolution
from imagenet_fast.data.thread_loader import central_crop, resized


def blobs(height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(height).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


SIZES = [(375, 500), (500, 333), (32, 32), (31, 97), (224, 224), (256, 400), (1, 1), (1, 90), (700, 3)]


@pytest.mark.parametrize("to", [(224, 224), (48, 48), (33, 61)])
def test_resize_agrees_with_pil(to: tuple[int, int]):
    for size in SIZES:
        image = blobs(*size)
        theirs = np.asarray(image.resize(to[::-1], Image.Resampling.BILINEAR)).astype(int)
        ours = resized(np.array(image), *to)
        assert ours.dtype == np.uint8
        assert np.abs(ours - theirs).max() <= 1, size


@pytest.mark.parametrize(("shorter", "side"), [(256, 224), (48, 48), (57, 32)])
def test_the_middle_is_torchvisions(shorter: int, side: int):
    for size in SIZES:
        image = blobs(*size)
        theirs = np.asarray(v2.Compose([v2.Resize(shorter), v2.CenterCrop(side)])(image)).astype(int)
        ours = central_crop(np.array(image), Resolution(side, shorter))
        assert ours.shape == (side, side, 3)
        assert np.abs(ours - theirs).max() <= 1, size


def test_a_thread_that_resizes_starts_no_others():
    """Each of the loader's threads would have a team of its own."""
    image = np.array(blobs(375, 500))
    running = []

    def resize_again_and_again() -> None:
        before = psutil.Process().num_threads()
        for _ in range(20):
            resized(image, 224, 224)
        running.append(psutil.Process().num_threads() - before)

    torch.set_num_threads(4)
    try:
        thread = threading.Thread(target=resize_again_and_again)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(1)
    assert running[0] <= 0
