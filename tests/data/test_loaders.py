"""dali and folder: the same pictures, the same pixels, the same statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imagenet_fast.data.dataset import Dataset, open_dataset
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.reading import parse_recipe
from imagenet_fast.recipe.schema import ImageData, SyntheticData
from tests.conftest import tables

ALONE = Batching(ranks=1, micro_batch=8, accumulation=1)
CPU = torch.device("cpu")
SYNTHETIC = SyntheticData(loader="synthetic", image_size=8, train_images=40, val_images=7, classes=3)


def picture_data(loader: str, **changes: object) -> ImageData:
    table = {"dataset": "digits", "loader": loader, "image_size": 48, "resize": 56, "workers": 1, **changes}
    data = parse_recipe("test", tables(data=table)).data
    assert isinstance(data, ImageData)
    return data


def opened(root: Path, loader: str, seed: int = 1, **changes: object) -> Dataset:
    return open_dataset(picture_data(loader, **changes), root, ALONE, 0, 1, CPU, seed)


def collect(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
    taken = list(islice(batches, count))
    return torch.cat([images for images, _ in taken]), torch.cat([labels for _, labels in taken])


def test_both_loaders_show_the_same_pixels_where_nothing_is_random(pictures: Path):
    dali, folder = opened(pictures, "dali", augment=False), opened(pictures, "folder", augment=False)
    for split, count in (("val", 1), ("train", 10)):
        ours, ours_labels = collect(getattr(dali, split), count)
        theirs, theirs_labels = collect(getattr(folder, split), count)
        assert torch.equal(ours_labels, theirs_labels)
        assert ours.shape == theirs.shape == (len(ours_labels), 3, 48, 48)
        assert ours.dtype == theirs.dtype == torch.float32
        # Decoders may round differently and centre a crop half a pixel apart.
        assert (ours - theirs).abs().mean() < 0.08


@pytest.mark.parametrize("loader", ["dali", "folder", "synthetic"])
@pytest.mark.parametrize("micro_batch", [8, 3, 1])
def test_every_batch_lies_in_channels_last_memory(pictures: Path, loader: str, micro_batch: int):
    """A batch of one and the smaller batch that ends an evaluation too."""
    data = SYNTHETIC if loader == "synthetic" else picture_data(loader)
    size = data.image_size
    dataset = open_dataset(data, pictures, Batching(1, micro_batch, 1), 0, 1, CPU, seed=1)
    batches = [next(dataset.train), next(dataset.train), *dataset.next_evaluation(), *dataset.next_evaluation()]
    assert len(batches[-1][0]) == (7 % micro_batch or micro_batch)
    for images, labels in batches:
        assert images.shape == (len(labels), 3, size, size)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert not images.is_contiguous()
        assert images.stride() == (3 * size * size, 1, 3 * size, 3)


def test_both_loaders_augment_alike(pictures: Path):
    """Per picture, over many epochs: the mean colour and the spread of crops agree within their standard error."""
    moments = {}
    for loader in ("dali", "folder"):
        dataset = opened(pictures, loader)
        images, _ = collect(dataset.train, 100)  # 20 epochs of 5 batches
        left, right = images[..., :24].mean((1, 2, 3)), images[..., 24:].mean((1, 2, 3))
        moments[loader] = torch.stack(
            [images.mean((1, 2, 3)), images.std((1, 2, 3)), left - right, (left - right).abs()], dim=1
        )
    ours, theirs = moments["dali"], moments["folder"]
    error = (ours.var(0) / len(ours) + theirs.var(0) / len(theirs)).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.15, atol=0)


def test_the_same_seed_shows_the_same_pixels_again_and_another_does_not(pictures: Path):
    first, _ = collect(opened(pictures, "dali").train, 12)
    again, _ = collect(opened(pictures, "dali").train, 12)
    other, _ = collect(opened(pictures, "dali", seed=2).train, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("loader", ["dali", "folder"])
def test_evaluations_follow_one_another_and_show_every_image_once(pictures: Path, loader: str):
    dataset = opened(pictures, loader)
    for _ in range(2):
        images = torch.cat([images for images, _ in dataset.next_evaluation()])
        assert len(images) == 7
    assert dataset.classes == 3


def test_synthetic_pictures_belong_to_their_labels():
    dataset = open_dataset(SYNTHETIC, None, ALONE, 0, 1, CPU, seed=1)
    (images, labels), (more, more_labels) = next(dataset.train), next(dataset.train)
    assert images.shape == (8, 3, 8, 8)
    assert labels.max() < 3
    val, val_labels = next(dataset.val)
    assert val_labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    for image, label in zip(torch.cat([images, more]), torch.cat([labels, more_labels]), strict=True):
        matches = [i for i, known in enumerate(val) if torch.equal(known, image)]
        assert all(val_labels[i] == label for i in matches)


def test_a_batch_beyond_the_data_set_is_refused(pictures: Path):
    with pytest.raises(UserError, match="40 images, fewer than one global batch of 64"):
        open_dataset(picture_data("dali"), pictures, Batching(2, 32, 1), 0, 2, CPU, 1)


def test_a_missing_dali_is_named_with_the_way_round(pictures: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    with pytest.raises(UserError, match=r"DALI is not installed; .* --set data.loader=folder"):
        opened(pictures, "dali")


RefusedFolder = Callable[[Path], None]


def _no_val(root: Path) -> None:
    (root / "train" / "cat").mkdir(parents=True)


def _no_classes(root: Path) -> None:
    (root / "train").mkdir()
    (root / "val").mkdir()


def _strange_class(root: Path) -> None:
    for split, name in (("train", "cat"), ("val", "dog")):
        (root / split / name).mkdir(parents=True)


def _empty_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "cat").mkdir(parents=True)
        (root / split / "cat" / "notes.txt").write_text("no picture")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: root.rmdir(), "there is no data directory .*; give one with --data"),
        (_no_val, "has no folder val"),
        (_no_classes, "train has no class folders"),
        (_strange_class, "val has 1 class.* that train lacks, the first 'dog'"),
        (_empty_class, "train/cat holds no images"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(make: RefusedFolder, sentence: str, tmp_path: Path):
    from imagenet_fast.data.imagefolder import check_folders, scan

    root = tmp_path / "data"
    root.mkdir()
    make(root)
    for look in (check_folders, scan):
        with pytest.raises(UserError, match=sentence):
            look(root)


def test_without_a_training_split_validation_is_numbered_by_its_own_classes(tmp_path: Path):
    from imagenet_fast.data.imagefolder import check_validation, scan_validation

    with pytest.raises(UserError, match="has no folder val"):
        check_validation(tmp_path)
    for name in ("dog", "cat"):
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "1.png").touch()
    check_validation(tmp_path)
    assert scan_validation(tmp_path).labels.tolist() == [0, 1]
    for name in ("dog", "cat", "bird"):
        (tmp_path / "train" / name).mkdir(parents=True)
    assert scan_validation(tmp_path).labels.tolist() == [1, 2]
    (tmp_path / "train" / "cat").rmdir()
    for look in (check_validation, scan_validation):
        with pytest.raises(UserError, match=r"1 class.* that train lacks, the first 'cat'"):
            look(tmp_path)
