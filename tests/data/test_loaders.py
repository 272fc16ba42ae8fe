"""dali and threads: the same images, the same pixels; bad ones named, or left out alike on any number of ranks."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections import defaultdict
from itertools import chain, islice
from pathlib import Path
from threading import current_thread
from typing import Any
from unittest.mock import Mock, create_autospec

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from imagenet_fast.data import dali, fingerprint, source
from imagenet_fast.data.build import open_loader
from imagenet_fast.data.folders import ImageFolder, scan_split
from imagenet_fast.data.loader import THREADS, StorageAway
from imagenet_fast.data.order import TrainSampler, augmentation_of
from imagenet_fast.data.pixels import EncodedImage, decode
from imagenet_fast.data.prepare.sources import recognise
from imagenet_fast.data.prepare.write import Sample, write_tar
from imagenet_fast.data.verify import verify
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from tests.conftest import refusal_of, refuses
from tests.data import small
from tests.data.encoded import BAD, BLOBS, IMAGES, encoded
from tests.data.small import ALONE, CPU, FORMATS, LOADERS, SYNTHETIC, collect, image_data, one_class, opened, put, same

BICUBIC = Image.Resampling.BICUBIC


def apart(root: Path, batches: int, **settings: Any) -> Tensor:
    """Of each image that both loaders show, how far its pixels are from the other's, on average.

    Decoders round by 0.005 at most; windows a pixel apart differ by 0.1 and more, mirrored images by 1.
    """
    dali, threads = (opened(root, loader, **settings) for loader in LOADERS)
    differences = []
    for ours, theirs in ((dali.train, threads.train), (dali.next_evaluation(), threads.next_evaluation())):
        for (images, labels), (others, alike) in islice(zip(ours, theirs, strict=True), batches):
            assert torch.equal(labels, alike)
            differences.append((images - others).abs().mean((1, 2, 3)))
    return torch.cat(differences)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"crop": "window"}, {"sizes": [[1, 36], [2, 40]], "eval_size": 52},
        {"sizes": [[1, 36], [2, 40]], "augment": False},
    ],
    ids=["cut", "window", "growing", "whole, growing"],
)  # fmt: skip
def test_both_loaders_show_the_same(image_dir: Path, settings: dict[str, Any]):
    """In two epochs, and in an evaluation."""
    assert apart(image_dir, 10, **settings).max() < 0.03


def test_both_loaders_show_the_same_middle_of_images_of_any_size(tmp_path: Path):
    """Where an odd number of pixels is too many, and where the longer side has a fraction of one."""
    random = np.random.default_rng(1)
    sizes = [(56, 56 + more) for more in range(8)]
    sizes += [(80, 57), (113, 75), (40, 31), (56, 400), (9, 7), (300, 299)]
    images = {}
    for height, width in sizes:
        grains = Image.fromarray(random.integers(0, 256, (-(-height // 2), -(-width // 2), 3), dtype=np.uint8))
        images[f"{height} x {width}"] = encoded(grains.resize((width, height), BICUBIC), "PNG")
    assert apart(one_class(tmp_path, images), 2).max() < 0.03


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("on_bad_image", ["fail", pytest.param("skip", marks=pytest.mark.ci)])
def test_both_loaders_and_verify_agree_on_what_can_be_read(tmp_path: Path, format: str, on_bad_image: str):
    root = small.as_format(one_class(tmp_path / "folders", IMAGES), format, tmp_path / "shards")
    assert not verify(root).quarantine
    assert apart(root, 10, on_bad_image=on_bad_image).max() < 0.05


@pytest.mark.parametrize("augment", [True, False])
def test_dali_is_given_jpegs_of_shards_without_a_look_at_them(image_dir: Path, tmp_path, augment, monkeypatch):
    monkeypatch.setattr(dali, "to_common_format", None)
    assert apart(small.as_format(image_dir, "webdataset", tmp_path), 10, augment=augment).max() < 0.03


@pytest.mark.parametrize("loader", [*LOADERS, "synthetic"])
def test_images_leave_every_loader_as_bytes_and_come_in_channels_last_memory(image_dir: Path, loader: str):
    """A batch of one and the smaller batch that ends an evaluation too."""
    data, split = (SYNTHETIC, None) if loader == "synthetic" else (image_data(loader), scan_split(image_dir, "train"))
    size = data.image_size
    images, labels, _ = next(iter(open_loader(data, split, TrainSampler(40, ALONE, 0, seed=1), 1, CPU, seed=1)))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert images.float().std() > 20
    batches = [(images, labels)]
    for micro_batch in (8, 3, 1):
        dataset = opened(image_dir, data, Batching(1, micro_batch, 1))
        batches += [next(dataset.train), *dataset.next_evaluation(), *dataset.next_evaluation()]
        assert len(batches[-1][0]) == (7 % micro_batch or micro_batch)
    for images, labels in batches:
        assert images.shape == (len(labels), 3, size, size)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert not images.is_contiguous()
        assert images.stride() == (3 * size * size, 1, 3 * size, 3)


@pytest.mark.parametrize("padding", [2, 0, 31])
def test_a_padded_crop_is_of_numpys_reflected_image(tmp_path: Path, padding: int):
    """Each crop is found, to the pixel, at one place of the padded image or of its mirror image."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (8, 32, 35, 3), dtype=np.uint8)
    one_class(tmp_path, {f"{number}": encoded(Image.fromarray(image), "PNG") for number, image in enumerate(images)})
    data = image_data(image_size=32, resize=32, crop="padded", crop_padding=padding)
    order = TrainSampler(8, ALONE, 0, seed=1)
    loaded = open_loader(data, scan_split(tmp_path, "train"), order, 1, CPU, seed=1)
    chance = augmentation_of(data, order)
    assert chance is not None
    places = set()
    for crops, _, indices in islice(loaded, 4):
        numbers, flips = chance.draw(indices)
        for index, crop, drawn, flip in zip(indices.images, crops, numbers.tolist(), flips, strict=True):
            widths = ((padding, padding), (padding, padding), (0, 0))
            padded = np.pad(images[index], widths, mode="reflect")
            top, left = (int(u * (side + 2 * padding - 31)) for u, side in zip(drawn[:2], (32, 35), strict=True))
            expected = padded[top : top + 32, left : left + 32]
            assert np.array_equal(crop.permute(1, 2, 0), expected[:, ::-1] if flip else expected)
            places.add((top, left, bool(flip)))
    assert len(places) > 7


@pytest.mark.parametrize(
    ("loader", "changes"),
    [("dali", {}), ("threads", {}), ("threads", {"crop": "padded", "crop_padding": 3}), ("synthetic", {})],
)
def test_loader_resumes_at_a_step_on_any_ranks(image_dir: Path, loader: str, changes: dict[str, object]):
    """Three epochs of 3 steps on one rank; steps 4 to 8 again on one, on two and on three, with other workers."""
    data = SYNTHETIC if loader == "synthetic" else image_data(loader, **changes)
    alone = Batching(ranks=1, micro_batch=2, accumulation=6)
    whole = list(islice(opened(image_dir, data, alone).train, 9 * 6))
    if loader != "synthetic":
        data = image_data(loader, workers=2, **changes)
    for ranks in (1, 2, 3):
        batching = Batching(ranks, 2, 6 // ranks)
        trains = [opened(image_dir, data, batching, rank, first_step=4).train for rank in range(ranks)]
        again = [batch for _ in range(5) for train in trains for batch in islice(train, batching.accumulation)]
        assert same(again, whole[4 * 6 :])
    assert not torch.equal(whole[0][0], whole[1][0])


def test_synthetic_images_belong_to_their_labels():
    dataset = opened(None, SYNTHETIC)
    (images, labels), (more, more_labels) = next(dataset.train), next(dataset.train)
    assert images.shape == (8, 3, 8, 8)
    assert labels.max() < 3
    val, val_labels = next(dataset.val)
    assert val_labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    pairs = zip(torch.cat([images, more]), torch.cat([labels, more_labels]), strict=True)
    same = [(val_labels[i], label) for image, label in pairs for i in range(len(val)) if torch.equal(val[i], image)]
    assert same
    assert all(known == label for known, label in same)


def test_a_batch_beyond_the_data_set_is_refused(image_dir: Path):
    assert "40 images, fewer than one global batch of 64" in refusal_of(opened, image_dir, "dali", Batching(2, 32, 1))


def test_a_missing_dali_is_named_with_the_way_round(image_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    refuses(r"DALI is not installed; .* --set data.loader=threads", opened, image_dir, "dali")


@pytest.mark.parametrize("augment", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_dali_is_given_pixels_of_what_it_cannot_decode(tmp_path: Path, augment: bool, monkeypatch):
    """Whatever that is: here nothing is found out about it beforehand."""
    names = ("jpeg", "png", "tiff", "gif")
    root = one_class(tmp_path, {f"{name} {copy}": IMAGES[name] for name in names for copy in range(4)})
    expected = collect(opened(root, "dali", augment=augment).train, 12)
    as_it_is = lambda encoded: EncodedImage(encoded, *decode(encoded).shape[:2])  # noqa: E731
    monkeypatch.setattr(dali, "to_common_format", as_it_is)
    decoded = create_autospec(dali.DaliLoader._decode, side_effect=dali.DaliLoader._decode)
    monkeypatch.setattr(dali.DaliLoader, "_decode", decoded)
    images = collect(opened(root, "dali", augment=augment).train, 12)
    assert 1 <= decoded.call_count <= 4, "not again in every epoch"
    assert (images - expected).abs().mean((1, 2, 3)).max() < 0.03


def test_what_is_no_fault_of_an_image_is_told_as_what_it_is(image_dir: Path, monkeypatch: pytest.MonkeyPatch):
    for error, told in (
        ("Critical error:\n\nencountered:\n\nCUDA out of memory\nmore", "left on the node (CUDA out of memory); take"),
        ("std::bad_alloc", "(std::bad_alloc); take a smaller data.prefetch (2 now) or fewer images a batch"),
        ("CUDA runtime API error cudaErrorECCUncorrectable (214)", "DALI cannot use the GPU (CUDA runtime API error"),
    ):
        with monkeypatch.context() as patch:
            train = opened(image_dir, "dali").train
            patch.setattr("nvidia.dali.Pipeline.run", Mock(side_effect=RuntimeError(error)))
            assert told in refusal_of(collect, train, 1)


@pytest.mark.parametrize("augment", [True, False])
def test_dali_knows_all_settings_of_the_graph_for_a_gpu(image_dir: Path, augment: bool, monkeypatch):
    """It looks at their names without one."""
    monkeypatch.setattr("nvidia.dali.Pipeline.build", Mock())
    data, order = image_data("dali", augment=augment), TrainSampler(40, ALONE, 0, seed=1)
    loader = dali.DaliLoader(scan_split(image_dir, "train"), order, data, torch.device("cuda", 0), 1)
    loader._pipeline(dali._Source([]))


@pytest.mark.parametrize(
    ("failing", "error"), [("dali.resolution", "invalid argument"), ("folders.ImageFolder.readahead", "out of memory")]
)
def test_an_error_on_the_way_to_dali_keeps_its_words(image_dir: Path, failing: str, error: str, monkeypatch):
    """Of allocating a batch, or of a thread that reads: it is not DALI's, nor a lack of the GPU's memory."""
    train = opened(image_dir, "dali").train
    collect(train, 2)
    told = f"CUDA error: {error} while pinning host memory"
    monkeypatch.setattr(f"imagenet_fast.data.{failing}", Mock(side_effect=RuntimeError(told)))
    with pytest.raises(RuntimeError, match=f"^{told}$"):
        collect(train, 9)


def test_a_folder_that_cannot_be_trained_on_is_refused(tmp_path: Path):
    for number, (files, sentence) in enumerate([
        ("", "there is no data directory .*; give one with --data"),
        ("train/cat/1.jpg", "has no folder val"),
        ("train/stray.jpg val/stray.jpg", "train has no class folders"),
        ("train/cat/1.jpg val/dog/1.jpg", "val has 1 class.* that train lacks, the first 'dog'"),
    ]):  # fmt: skip
        put(tmp_path / f"{number}", *files.split())
        for look in (source.check_folders, small.scan):
            refuses(sentence, look, tmp_path / f"{number}")


def test_a_class_link_that_leads_nowhere_is_refused(tmp_path: Path):
    """Without it in both splits, all classes behind it would have other labels."""
    small.put_classes(tmp_path, "ant", "cow")
    for split in ("train", "val"):
        (tmp_path / split / "bee").symlink_to("/nowhere")
    for look in (source.check_folders, source.open_training, source.open_validation, verify, recognise):
        assert "train/bee is a link that leads nowhere" in refusal_of(look, tmp_path)


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path):
    small.put_classes(tmp_path, "ant")
    (tmp_path / "train/bee").symlink_to("b" * 300)
    for look in (source.check_folders, source.open_training, source.open_validation, verify):
        assert "train/bee cannot be read (File name too long)" in refusal_of(look, tmp_path)


def test_validation_alone_numbers_its_own_classes(tmp_path: Path):
    assert "has no folder val" in refusal_of(source.check_validation, tmp_path)
    for name in ("dog", "cat"):
        put(tmp_path / "val" / name, "1.png")
    source.check_validation(tmp_path)
    assert scan_split(tmp_path, "val").labels.tolist() == [0, 1]
    for name in ("dog", "cat", "bird"):
        (tmp_path / "train" / name).mkdir(parents=True)
    assert scan_split(tmp_path, "val").labels.tolist() == [1, 2]
    (tmp_path / "train" / "cat").rmdir()
    for look in (source.check_validation, lambda root: scan_split(root, "val")):
        refuses(r"1 class.* that train lacks, the first 'cat'", look, tmp_path)


ALL = pytest.mark.parametrize("loader", LOADERS)
EPOCHS = 4
"""An epoch of 3 steps of 12 leaves out 4 of the 40 images, others each time."""


@pytest.fixture
def damaged(image_dir: Path, tmp_path: Path) -> Path:
    return small.with_bad_images(image_dir, tmp_path / "damaged é")


@ALL
def test_an_image_that_is_bad_or_has_gone_is_named(image_dir: Path, tmp_path: Path, loader: str, monkeypatch):
    shutil.copytree(image_dir, tmp_path / "data")
    monkeypatch.setattr(source, "_PAUSES_S", (0.01,))
    path = tmp_path / "data" / "train" / "class2" / "017.jpg"
    for bad, told in (
        *((bad, r"decoded \(.*\); .*--set data.on_bad_image=skip") for bad in ("empty", "half a jpeg")),
        ("", r"read .*No such file.*\); put that right$"),
    ):
        train = opened(tmp_path / "data", loader, Batching(1, 40, 1), on_bad_image="fail").train
        path.write_bytes(BAD[bad]) if bad else path.unlink()
        with pytest.raises(UserError if bad else StorageAway, match=rf"{path} cannot be {told}"):
            next(train)


@ALL
def test_a_shard_that_has_gone_ends_a_run_that_skips_bad_images_too(tmp_path: Path, loader: str, monkeypatch):
    """It is no damage that stays: the server of the files may be away for a while."""
    monkeypatch.setattr(source, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(fingerprint, "_SAMPLE", 1)  # shards that were read stay open
    shards = [tmp_path / f"train-{number}.tar" for number in range(4)]
    for number, path in enumerate([*shards, tmp_path / "val-0.tar"]):
        write_tar(path, [(n, Sample(f"{number}-{n}", encoded(BLOBS, "JPEG"), n % 2)) for n in range(5)])
    trains = [opened(tmp_path, loader, Batching(1, 20, 1), on_bad_image=answer).train for answer in ("fail", "skip")]
    (gone := shards[1]).unlink()
    for train in trains:
        with pytest.raises(StorageAway, match=rf"{gone}.*No such file.*; put that right$"):
            next(train)


@ALL
def test_threads_announce_what_they_will_read(image_dir: Path, loader: str, monkeypatch):
    """Not the one that trains: to open the shards of a batch takes long on a file server."""
    announced: dict[str, list[int]] = defaultdict(list)
    monkeypatch.setattr(ImageFolder, "readahead", lambda _, indices: announced[current_thread().name].extend(indices))
    order = TrainSampler(40, ALONE, 0, seed=1)
    *_, indices = next(iter(open_loader(image_data(loader), scan_split(image_dir, "train"), order, 2, CPU, seed=1)))
    assert all(name.startswith(THREADS) for name in announced)
    assert set(indices.images) <= set(chain(*announced.values()))


@ALL
def test_an_error_of_the_disk_that_passes_leaves_no_trace(image_dir: Path, loader: str, monkeypatch, capfd):
    monkeypatch.setattr(source, "_PAUSES_S", (0.01, 0.01))
    expected = torch.cat([labels for _, labels in opened(image_dir, loader).next_evaluation()])
    read, failures = ImageFolder.read, iter([True, False, True, True, False])

    def unsteady(images: ImageFolder, index: int) -> bytes:
        if index == 2 and next(failures, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(images, index)

    dataset = opened(image_dir, loader, on_bad_image="skip")
    monkeypatch.setattr(ImageFolder, "read", unsteady)
    for _ in range(2):
        assert torch.equal(torch.cat([labels for _, labels in dataset.next_evaluation()]), expected)
    assert not capfd.readouterr().err


@ALL
def test_short_memory_is_no_fault_of_an_image(image_dir: Path, loader: str, monkeypatch: pytest.MonkeyPatch):
    for error in (MemoryError(), cv2.error("(-4:Insufficient memory)"), RuntimeError("can't allocate memory: you")):
        train = opened(image_dir, loader, on_bad_image="skip").train
        for loads in ("loader.random_crop", "dali.to_common_format"):
            monkeypatch.setattr(f"imagenet_fast.data.{loads}", Mock(side_effect=error))
        assert "jpg cannot be decoded, as there is too little memory; let each" in refusal_of(collect, train, 1)


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
    labels = scan_split(damaged, "train").labels
    changed = 0
    for order, (ours, our_labels), (theirs, their_labels) in islice(
        zip(both[0].train_order, both[0].train, both[1].train, strict=False), 8
    ):
        assert torch.equal(our_labels, their_labels)
        assert (ours - theirs).abs().mean((1, 2, 3)).max() < 0.03
        changed += int((our_labels.numpy() != labels[order.images]).sum())
    assert changed, "of ten some stand-ins are of another class"


@ALL
@pytest.mark.parametrize("format", FORMATS)
def test_in_an_evaluation_a_bad_image_counts_and_counts_as_wrong(damaged: Path, tmp_path, format: str, loader: str):
    root = small.as_format(damaged, format, tmp_path / "shards")
    dataset = opened(root, loader, Batching(1, 3, 1), on_bad_image="skip")
    for _ in range(2):
        images, labels = (torch.cat(part) for part in zip(*dataset.next_evaluation(), strict=True))
        assert (labels == -1).nonzero().tolist() == [[4]]
        assert images[4].std(dim=(1, 2)).max() < 1e-6
        assert len(images) == 7


@ALL
def test_a_folder_of_nothing_but_bad_images_ends_the_run(tmp_path: Path, loader: str):
    one_class(tmp_path, dict.fromkeys("0123", BAD["text"]))
    train = opened(tmp_path, loader, Batching(1, 2, 1), on_bad_image="skip").train
    refuses(r"all/\d.jpg cannot be decoded, nor can any of 100 other images", next, train)
