"""Batches come to a GPU on a stream of their own: beside what it computes, and whole before that reads them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from imagenet_fast.data.build import build_loaders, open_loader
from imagenet_fast.data.folders import scan_split
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.recipe.data_config import ImageData
from tests.data.small import ALONE, CPU, collect, image_data
from tests.gpu_semantics.pretended_gpu import CUDA, OnGpu, PretendedGpu

READ = image_data(resident=False)


def trained_on(image_dir: Path, gpu: PretendedGpu, batches: int = 4, data: ImageData = READ) -> list[Tensor]:
    """The images of a loop that computes with each batch, and lets go of it."""
    dataset, kept = build_loaders(data, image_dir, ALONE, 0, 2, CUDA, seed=1), []
    for images, _ in islice(dataset.train, batches):
        with gpu.step():
            kept.append(images * 1)
        del images
    return [images.cpu() for images in kept]


def test_a_network_reads_whole_batches_whose_memory_stays_theirs(image_dir: Path):
    expected = collect(build_loaders(READ, image_dir, ALONE, 0, 2, CPU, seed=1).train, 4)
    with PretendedGpu() as gpu:
        assert torch.equal(torch.cat(trained_on(image_dir, gpu)), expected)
        assert not gpu.detector.found


@pytest.mark.parametrize("resident", [True, False])
def test_stored_pixels_are_resized_there_beside_what_it_computes(image_dir: Path, tmp_path: Path, resident: bool):
    """Within two grey levels, of which one is 0.02 when normalised."""
    settings, pixels = Settings(format="pixels", resize=None, quality=None, shard_size=10**9), tmp_path / "pixels"
    prepare(image_dir, pixels, settings, subset=True)
    expected = collect(build_loaders(READ, pixels, ALONE, 0, 2, CPU, seed=1).train, 4)
    with PretendedGpu() as gpu:
        found = torch.cat(trained_on(pixels, gpu, data=image_data(resident=resident)))
        assert not gpu.detector.found
    assert (found - expected).abs().max() < 0.04


def test_a_copy_does_not_wait_for_what_is_computed(image_dir: Path):
    order = TrainSampler(40, ALONE, 0, seed=1)
    with PretendedGpu() as gpu:
        batches = iter(open_loader(READ, scan_split(image_dir, "train"), order, 1, CUDA, seed=1))
        next(batches)
        torch.zeros(8, device=CUDA).add_(1)
        computed = gpu.detector.last
        next(batches)
        copy = gpu.detector.last
    assert copy.stream != computed.stream
    assert copy.before[computed.stream] < computed.number


@pytest.mark.parametrize(("left_out", "told"), [("wait_event", "does not wait for"), ("", "was freed while")])
def test_what_is_left_out_is_found(image_dir: Path, left_out: str, told: str):
    """The wait for the copy; or that the network's stream uses its memory."""
    shares = OnGpu.record_stream if left_out else lambda *_: None
    with PretendedGpu(without=left_out) as gpu, patch.object(OnGpu, "record_stream", shares):
        trained_on(image_dir, gpu)
        assert told in "".join(gpu.detector.found)
