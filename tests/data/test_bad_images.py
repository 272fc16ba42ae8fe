"""Bad images: named, or left out in the same way on any number of ranks."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from imagenet_fast.data.imagefolder import scan_training
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from tests.data.encoded import BAD
from tests.data.small import LOADERS, one_class, opened, same, with_bad_images

ALL = pytest.mark.parametrize("loader", LOADERS)
EPOCHS = 4
"""An epoch of 3 steps of 12 leaves out 4 of the 40 images, others each time."""


@pytest.fixture
def damaged(image_dir: Path, tmp_path: Path) -> Path:
    return with_bad_images(image_dir, tmp_path / "damaged é")


@ALL
def test_an_image_that_is_bad_or_has_gone_is_named(image_dir: Path, tmp_path: Path, loader: str):
    shutil.copytree(image_dir, tmp_path / "data")
    path = tmp_path / "data" / "train" / "class2" / "017.jpg"
    for bad, told in (
        *((bad, r"decoded \(.*\); .*--set data.on_bad_image=skip") for bad in ("empty", "half a jpeg")),
        ("", "read .*No such file"),
    ):
        train = opened(tmp_path / "data", loader, Batching(1, 40, 1), on_bad_image="fail").train
        path.write_bytes(BAD[bad]) if bad else path.unlink()
        with pytest.raises(UserError, match=rf"{path} cannot be {told}"):
            next(train)


@ALL
def test_others_stand_in_for_bad_images_the_same_on_any_ranks(damaged: Path, loader: str, capfd):
    whole = list(islice(opened(damaged, loader, Batching(1, 2, 6), on_bad_image="skip").train, EPOCHS * 3 * 6))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(told) == len(set(told)) == 10, "each once, and none is left out of every epoch"
    assert all("damaged é" in line and "cannot be decoded" in line for line in told)
    assert told[-1].endswith("another is shown instead; bad images so far on this rank: 10")
    assert all(len(images) == 2 and images.any() for images, _ in whole)
    ranks = [opened(damaged, loader, Batching(3, 2, 2), rank, on_bad_image="skip").train for rank in range(3)]
    assert same([batch for _ in range(EPOCHS * 3) for train in ranks for batch in islice(train, 2)], whole)


def test_a_stand_in_brings_its_label_and_the_loaders_agree_on_it(damaged: Path):
    both = [opened(damaged, loader, Batching(1, 10, 1), on_bad_image="skip") for loader in LOADERS]
    labels = scan_training(damaged).labels
    changed = 0
    for order, (ours, our_labels), (theirs, their_labels) in islice(
        zip(both[0].train_order, both[0].train, both[1].train, strict=False), 8
    ):
        assert torch.equal(our_labels, their_labels)
        assert (ours - theirs).abs().mean((1, 2, 3)).max() < 0.03
        changed += int((our_labels.numpy() != labels[order.images]).sum())
    assert changed, "of ten some stand-ins are of another class"


@ALL
def test_in_an_evaluation_a_bad_image_counts_and_counts_as_wrong(damaged: Path, loader: str):
    dataset = opened(damaged, loader, Batching(1, 3, 1), on_bad_image="skip")
    for _ in range(2):
        images, labels = (torch.cat(part) for part in zip(*dataset.next_evaluation(), strict=True))
        assert (labels == -1).nonzero().tolist() == [[4]]
        assert images[4].std(dim=(1, 2)).max() < 1e-6
        assert len(images) == 7


@ALL
def test_a_folder_of_nothing_but_bad_images_ends_the_run(tmp_path: Path, loader: str):
    one_class(tmp_path, dict.fromkeys("0123", BAD["text"]))
    train = opened(tmp_path, loader, Batching(1, 2, 1), on_bad_image="skip").train
    with pytest.raises(UserError, match=r"all/\d.jpg cannot be decoded, nor can any of 100 other images"):
        next(train)
