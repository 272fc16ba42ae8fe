"""Which files are images and which folders are classes is one rule: training, verify, prepare and the index agree."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from imagenet_fast.data.folders import SUFFIXES, scan_split
from imagenet_fast.data.prepare.run import prepare, report
from imagenet_fast.data.source import find_shards, open_training
from imagenet_fast.data.verify import verify
from tests.conftest import refuses
from tests.data.encoded import BLOBS, encoded
from tests.data.small import WHOLE, put, put_classes, scan

IMAGES = ["1.jpg", "2.JPEG", "3.Png", "4.jfif", "5.tif", "6.TIFF", "7.gif", "8.avif", "9.ppm", "a b%s.jpg", "-rf.jpe"]
IMAGES += [".hidden.jpg", "é\n.webp", "日本.BMP", os.fsdecode(b"\xff.jpg")]
NO_IMAGES = ["._1.jpg", ".DS_Store", "Thumbs.db", "notes.txt", "1.jpg.part", "photo.heic", "jpg", "list.csv"]
NO_CLASSES = [".ipynb_checkpoints", "@eaDir", "@EADIR", "__MACOSX", ".Trash-1000", "$RECYCLE.BIN", "lost+found"]
CLASSES = ["-rf", "a class", "é", "100%"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two splits of odd but right names, with all around them that systems, editors and people leave."""
    root = tmp_path / "source"
    for split in ("train", "val"):
        for name in CLASSES:
            put(root / split / name, *IMAGES, *NO_IMAGES)
            put(root / split / name / "@eaDir" / "1.jpg", "SYNOPHOTO_THUMB.jpg")
            put(root / split / name / ".ipynb_checkpoints", "1-checkpoint.jpg")
        for name in NO_CLASSES:
            put(root / split / name, "1.jpg")
        put(root / split, ".DS_Store", "Thumbs.db")
    return root


def there(root: Path) -> set[str]:
    """What would be trained on, and validated on."""
    return {os.path.relpath(split.name(index), root) for split in scan(root) for index in range(len(split))}


EXPECTED = {f"{split}/{name}/{image}" for split in ("train", "val") for name in CLASSES for image in IMAGES}


def test_training_verify_and_prepare_take_the_same_images_and_classes(source: Path, tmp_path: Path):
    assert there(source) == EXPECTED
    assert scan_split(source, "train").classes == sorted(CLASSES)
    found = verify(source)
    assert found.classes == {split: dict.fromkeys(CLASSES, len(IMAGES)) for split in ("train", "val")}
    assert not found.quarantine
    prepared = prepare(source, tmp_path / "out", WHOLE, subset=True)
    assert there(tmp_path / "out") == EXPECTED
    assert [sorted(classes) for classes in prepared.record.splits.values()] == [sorted(CLASSES)] * 2
    (line,) = (line for line in report(prepared, tmp_path / "out") if "no images" in line)
    assert line.endswith(f" and {2 * (len(CLASSES) * len(NO_IMAGES) + 1) - 3} more")  # with Thumbs.db beside them


def test_every_suffix_of_an_image_is_read_by_the_loaders(tmp_path: Path):
    kinds = {".jpe": "JPEG", ".jpg": "JPEG", ".jfif": "JPEG", ".tif": "TIFF", ".pgm": "PPM"}
    for split in ("train", "val"):
        for suffix in SUFFIXES:
            kind = kinds.get(suffix, suffix[1:].upper())
            put(tmp_path / split / "all", f"1{suffix}", content=encoded(BLOBS, kind))
    assert len(open_training(tmp_path)) == len(SUFFIXES)
    assert not verify(tmp_path).quarantine


def test_folders_of_a_system_beside_shards_are_no_split(tmp_path: Path):
    for split in ("train", "val"):
        put(tmp_path / split / "@eaDir", "1.jpg")
        (tmp_path / split / f"{split}-0.tar").touch()
    assert find_shards(tmp_path, "train") == [tmp_path / "train/train-0.tar"]


# Images that lie deeper.


def nested(root: Path) -> Path:
    put_classes(root, "cat", "dog")
    put(root / "train/dog/more", "2.jpg", "3.PNG", "notes.txt")
    put(root / "train/dog/more/folder.jpg", "4.gif")
    put(root / "elsewhere", "5.jpg")
    (root / "train/dog/linked").symlink_to(root / "elsewhere")
    return root


def test_prepare_counts_images_in_nested_folders_and_beside_classes(tmp_path: Path):
    source, out = nested(tmp_path / "source"), tmp_path / "out"
    put(source / "train", "stray.jpg")
    put(source / "train/cat", "phone.heic", "notes.txt", os.fsdecode(b"\xff.txt"))
    put(source / "train/.ipynb_checkpoints", "1.jpg")
    for _ in range(2):  # also where there is nothing to do
        prepared = prepare(source, out, WHOLE, subset=True)
        (line,) = (line for line in report(prepared, out) if "belong to no class" in line)
        assert line.startswith("left out, as they lie in no class's own folder and so belong to no class: 5 images, ")
        assert set(prepared.record.apart) == {
            "train/dog/more/2.jpg", "train/dog/more/3.PNG", "train/dog/more/folder.jpg/4.gif",
            "train/dog/linked/5.jpg", "train/stray.jpg",
        }  # fmt: skip


def test_a_class_whose_images_all_lie_deeper_is_refused_with_their_number(tmp_path: Path):
    root = put_classes(tmp_path / "source", "cat")
    put(root / "train/dog/more", "1.jpg", "2.jpg")
    told = r"train/dog holds no images .*2 lie in folders inside it, as more/1\.jpg; move them up into .*train/dog"
    refuses(told, scan_split, root, "train")
    refuses(told, prepare, root, tmp_path / "out", WHOLE, subset=True)


def test_training_warns_of_images_that_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = nested(tmp_path / "data")
    put(root / "train", "stray.png")
    for _ in range(2):  # from the listing, and from the index
        assert len(scan_split(root, "train")) == 2
        told = capsys.readouterr().err
        assert "5 images lie in no class's own folder, as dog/linked/5.jpg, and are left out; move them" in told


# Where prepare writes.


def test_prepare_does_not_write_into_its_source(tmp_path: Path):
    root = put_classes(tmp_path / "source", "cat")
    (tmp_path / "link").symlink_to(root)
    before = sorted(root.rglob("*"))
    outs = (".", "out", "train", "train/cat/out", "../link/out", "../source/../source/out")
    for source, out in product((root, tmp_path / "link"), outs):
        told = r"--out .* lies in --source .*; give a directory beside it"
        refuses(told, prepare, source, root / out, WHOLE, subset=True)
    assert sorted(root.rglob("*")) == before
