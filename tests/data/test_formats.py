"""Class folders and WebDataset tars: the same images with the same labels, whatever holds them."""

from __future__ import annotations

import os
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from imagenet_fast.data.pixels import ImageDecodeError
from imagenet_fast.data.prepare.write import Sample, write_classes, write_tar
from imagenet_fast.data.source import ImageSource, check_folders, check_validation, open_training, open_validation
from imagenet_fast.data.verify import verify
from imagenet_fast.errors import UserError
from tests.conftest import refusal_of, refuses
from tests.corruption import corrupted
from tests.data.prepare import replica
from tests.data.prepare.replica import Members, named
from tests.data.small import Damage, cut, overwritten, put, put_classes

CLASSES = ["a class", "n01440764", "n01443537", "schön 'quoted'"]
STRANGE = [
    "1.jpg", "of spaces .jpeg", "äöü€😀.PNG", "two\nlines.jpg", "l" * 240 + ".jpg", "-f.jpg", "x.y.z.bmp", "%s.webp",
]  # fmt: skip


def shown(images: ImageSource) -> list[tuple[bytes, int]]:
    """Bytes and label of each image."""
    return [(images.read(i), label) for i, label in enumerate(images.labels.tolist())]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders and tars of 54 images in 4 classes and 13 to validate, of which one class has none; of strange names."""
    place = tmp_path_factory.mktemp("formats")
    drawn = random.Random(0)
    for split, count in (("train", 53), ("val", 13)):
        for number in range(count):
            folder = place / "folder" / split / CLASSES[number % (4 if split == "train" else 3)]
            folder.mkdir(parents=True, exist_ok=True)
            name = STRANGE[number // 4] if number // 4 < len(STRANGE) else f"{number}.jpg"
            (folder / name).write_bytes(b"\xff\xd8" + drawn.randbytes(1 + drawn.randrange(3000)))
    (place / "folder" / "train" / CLASSES[0] / os.fsdecode(b"not utf-8 \xff.jpg")).write_bytes(b"BM")
    for split, images in (("train", open_training(place / "folder")), ("val", open_validation(place / "folder"))):
        (place / "tars").mkdir(exist_ok=True)
        write_classes(place / "tars", images.classes)
        samples = [Sample(images.name(i), images.read(i), int(images.labels[i])) for i in range(len(images))]
        for begin in range(0, len(samples), 4):
            write_tar(place / f"tars/{split}-{begin // 4:06}.tar", enumerate(samples[begin : begin + 4], begin))
    open_training(place / "tars"), open_validation(place / "tars")  # which leaves an index
    return place / "folder", place / "tars"


def test_folders_and_tars_hold_the_same_images_in_the_same_order(both: tuple[Path, Path]):
    """And so show the same ones to any rank: what is left out of an epoch, and its order, go by their numbers alone."""
    for split, look in (("train", open_training), ("val", open_validation)):
        folder, tars = map(look, both)
        files = [path.read_bytes() for path in both[0].glob(f"{split}/*/*")]
        assert sorted(image for image, _ in shown(folder)) == sorted(files)
        assert len(set(files)) == len(files) >= 10
        assert tars.classes == folder.classes == CLASSES
        assert shown(tars) == shown(folder)


def test_what_is_told_of_an_image_leads_to_it(both: tuple[Path, Path]):
    folder, tars = map(open_training, both)
    for i in range(54):
        assert Path(folder.name(i)).read_bytes() == folder.read(i)
        shard, _, member = tars.name(i).partition(": ")
        with tarfile.open(shard) as tar:
            assert tar.extractfile(member).read() == tars.read(i)


def test_many_threads_read_from_few_open_files(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (12, 12))
    folder, images = map(open_training, both)
    before = len(list(Path("/proc/self/fd").iterdir()))
    everything = np.random.default_rng(0).permutation(np.tile(np.arange(54), 20))
    with ThreadPoolExecutor(8) as threads:
        for begin in range(0, len(everything), 40):
            images.readahead(everything[begin : begin + 40])
        read = list(threads.map(images.read, everything))
    assert read == [folder.read(i) for i in everything]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3


# Shards of others.


def tar_of(path: Path, files: Members, format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(replica.tar_of(files, format))
    return path


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_shards_of_any_tar_with_what_else_webdataset_keeps_are_read(tmp_path: Path, format: int):
    """Long names in either dialect, folders, labels before images or far behind, json beside them, AppleDoubles."""
    long = "deep/" + "ü" * 200
    files = {"deep": named("deep", tarfile.DIRTYPE), "deep/._a.jpg": b"?", "deep/a.cls": b"1\n", "deep/a.JPEG": b"A"}
    files |= {f"{long}.png": b"LONG", "deep/a.json": b"{}", "b.jpg": b"B", f"{long}.cls": b"0", "b.cls": b"2"}
    tar_of(tmp_path / "train/shard 1.tar", files, format)
    tar_of(tmp_path / "train/shard 0.tar", {})
    tar_of(tmp_path / "validation/0.tar", {"a.jpg": b"V", "a.cls": b"1"})
    train, val = open_training(tmp_path), open_validation(tmp_path)
    assert shown(train) == [(b"A", 1), (b"LONG", 0), (b"B", 2)]
    assert [train.name(i).rpartition(": ")[2] for i in range(3)] == ["deep/a.JPEG", f"{long}.png", "b.jpg"]
    assert train.classes == val.classes == ["0", "1", "2"]
    assert shown(val) == [(b"V", 1)]


GOOD: Members = {"a.jpg": bytes(2000), "a.cls": b"0\r\n"}


def as_it_is(path: Path) -> None:
    """No damage but what is written."""


LINK = named("b.jpg", tarfile.SYMTYPE, "/etc/passwd")
NINE: Members = {f"{number}.{kind}": b"1" for number in range(9) for kind in ("jpg", "cls")}
NO_LABELS = (b"", b"cat", b"-1", b"4000000000", b"9" * 99, "5\n".encode("utf-16"))
UNREAD = ("photo.v2.jpg", "photo.v2.cls", "deep.er/photo.mask.PNG", "photo.gif")
BAD_TARS: list[tuple[Members, Damage, str]] = [
    (GOOD, cut(1000), "train-0.tar is no whole tar file (unexpected end of data)"),
    (GOOD, cut(0), "train-0.tar is no whole tar file (empty file)"),
    (GOOD, cut(512 * 7), "train-0.tar ends without an end mark at byte 3584"),
    (GOOD, overwritten(2560, b"garbage"), "train-0.tar is damaged at byte 2560"),
    (GOOD, overwritten(0, b"\x1f\x8b\x08"), "train-0.tar is compressed, so"),
    (GOOD | {"b.cls": b"1", "b.jpg": b"?"}, overwritten(2560, bytes(1024)), "train-0.tar is damaged at byte 2560"),
    (NINE, overwritten(4096, bytes(4096)), "at byte 4096"),
    (GOOD | {"b.jpg": b""}, as_it_is, "train-0.tar: b.jpg lacks its label, b.cls"),
    (GOOD | {"b.cls": b"1"}, as_it_is, "train-0.tar: b.cls lacks its image, b.jpg"),
    (GOOD | {"b.jpg": LINK}, as_it_is, "train-0.tar: b.jpg is no plain file"),
    *((GOOD | {name: b""}, as_it_is, f"train-0.tar: {name} would not be read") for name in UNREAD),
    (GOOD, lambda path: path.rename(path.with_name("train-0.tar.gz")), "train-0.tar.gz is compressed, so that"),
    (GOOD, lambda path: path.rename(path.with_name("train-0.tgz")), "train-0.tgz is compressed, so that"),
    (GOOD, lambda path: path.rename(path.parents[1] / "val_train.tar"), "val_train.tar would be taken for train, and"),
    (GOOD | {"a.png": b""}, as_it_is, "train-0.tar: a.png is the second of its key"),
    *(({"a.jpg": b"", "a.cls": label}, as_it_is, "a.cls holds no label; write a number") for label in NO_LABELS),
    ({}, as_it_is, "no image in the 1 shard(s) of the train split"),
    ({"n01440764_1.JPEG": b""}, lambda path: path.rename(path.with_name("n01440764.tar")), "data prepare"),
    ({}, lambda path: path.rename(path.with_name("ILSVRC2012_img_train.tar")), "data prepare"),
]


def test_a_bad_tar_is_told_with_its_place(tmp_path: Path):
    for number, (members, damage, sentence) in enumerate(BAD_TARS):
        root = tmp_path / f"{number}"
        damage(tar_of(root / "train/train-0.tar", members))
        tar_of(root / "val.tar", GOOD)
        for _ in range(2):  # no index is left that would be believed
            assert sentence in refusal_of(open_training, root)
        assert sentence in refusal_of(verify, root)
        assert not list(root.glob(".imagenet-fast*"))


@pytest.mark.parametrize("rounds", [8, pytest.param(60, marks=pytest.mark.ci)])
def test_no_bytes_whatever_are_more_than_refused(tmp_path: Path, rounds: int):
    """Shards in which some bytes are others: read, or refused in a sentence."""
    drawn = random.Random(0)
    whole = replica.tar_of(GOOD | {"ü" * 120 + ".jpg": b"x", "ü" * 120 + ".cls": b"1"})
    for round in range(rounds):
        root = tmp_path / f"{round}"
        root.mkdir()
        (root / "train-0.tar").write_bytes(corrupted(whole, drawn))
        with suppress(UserError, ImageDecodeError):
            train = open_training(root)
            for i in range(len(train)):
                train.read(i)


def test_an_image_in_a_shard_that_is_cut_off_by_now_is_bad_and_named(tmp_path: Path):
    train = open_training(tar_of(tmp_path / "train-0.tar", GOOD).parent)
    cut(100)(tmp_path / "train-0.tar")
    assert train.name(0) == f"{tmp_path}/train-0.tar: byte 512"
    with pytest.raises(ImageDecodeError, match="its shard is truncated"):
        train.read(0)


def test_classes_txt_names_what_shards_only_number(tmp_path: Path):
    tar_of(tmp_path / "train-0.tar", GOOD)
    tar_of(tmp_path / "val-0.tar", {"a.jpg": b"V", "a.cls": b"2"})
    refuses("val-0.tar: a.jpg has the label 2, counted from 0, and there are 1 classes", open_validation, tmp_path)
    (tmp_path / "classes.txt").write_text("cat\r\ndog\nan owl")
    assert open_training(tmp_path).classes == open_validation(tmp_path).classes == ["cat", "dog", "an owl"]
    (tmp_path / "classes.txt").write_text("cat\n\ndog\n")
    assert "classes.txt: every class has a name of its own" in refusal_of(open_training, tmp_path)
    for encoding, told in (("utf-8-sig", ""), ("utf-16", "classes.txt is not UTF-8"), ("latin-1", "save it as UTF-8")):
        (tmp_path / "classes.txt").write_text("cat\r\ndög\r\nan owl\r\n", encoding=encoding)
        with nullcontext() if not told else pytest.raises(UserError, match=told):
            assert open_training(tmp_path).classes == ["cat", "dög", "an owl"]


@pytest.mark.parametrize(("label", "told"), [(2, "2 and 2 of them occur, 1 not; name all"), (2 * 10**9, "2 of them")])
def test_labels_that_never_occur_are_named_by_classes_txt_or_refused(tmp_path: Path, label: int, told: str):
    tar_of(tmp_path / "train-0.tar", GOOD | {"b.jpg": b"", "b.cls": f"{label}".encode()})
    assert told in refusal_of(open_training, tmp_path)
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\n")
    if label == 2:
        assert open_training(tmp_path).labels.tolist() == [0, 2]


def test_validation_alone_is_numbered_by_itself(tmp_path: Path):
    tar_of(tmp_path / "val-0.tar", GOOD | {"b.jpg": b"V", "b.cls": b"1"})
    check_validation(tmp_path)
    assert open_validation(tmp_path).classes == ["0", "1"]
    assert "has shards of the val split but none of that kind of train" in refusal_of(check_folders, tmp_path)


def test_an_incomplete_or_ambiguous_directory_is_refused(tmp_path: Path):
    for number, (names, sentence) in enumerate([
        ("train-0.tar train-1.tar train-3.tar", "lacks 1 of the 4 parts like train-0.tar, number 2 first"),
        ("train-0-of-3.tar train-1-of-3.tar", "lacks 1 of the 3 parts like train-0-of-3.tar, number 2 first"),
        ("train_1_of_3.tar train_3_of_3.tar", "lacks 1 of the 3 parts like train_1_of_3.tar, number 2 first"),
        ("train-0000-ab1.tar train-0002-ab1.tar", "lacks 1 of the 3 parts like train-0000-ab1.tar, number 1 first"),
        ("train-0-of-1.tar train-0-of-2.tar train-1-of-2.tar", "several sets of parts like train-0-of-1.tar"),
        ("train-00000-of-00002-a09b.tar train-00000-of-00002-13fa.tar", "several sets of parts like train-00000"),
        ("train-00001-of-00002-a09b.tar", "lacks 1 of the 2 parts like train-00001-of-00002-a09b.tar, number 2 first"),
        ("train.part1of3.tar train.part2of3.tar", "lacks 1 of the 3 parts like train.part1of3.tar, number 3 first"),
        ("train-0-of-1.tar train-1-of-1.tar", "several sets of parts like train-0-of-1.tar; keep one of them"),
        ("train/cat/1.jpg validation/cat/1.jpg", "has no folder val; it must hold train/<class>/* and val/<class>/*"),
        ("train-00000-of-00003", "train-00000-of-00003 is a TFRecord by its name, and these are not read"),
        ("train-0.tar train.tfrecord.gz", "train.tfrecord.gz is a TFRecord by its name, and these are not read"),
        ("imagenet-train.tfrecord-00000-of-00001", "write its images as WebDataset tars (KEY.jpg and KEY.cls) or into"),
        ("train-0.tar train/cat/1.jpg", "in several formats"),
        ("train-0-of-2.tar train-1-of-2.tar train-2-of-4.tar train-3-of-4.tar", "several sets of parts like train-0"),
        ("train-0.tar val/val-0.tar validation/validation-0.tar", "holds parts of val and of validation; keep one set"),
        ("train-0.tar train/train-0.tar", "both hold train-0.tar, whose images would count twice; keep one"),
    ]):  # fmt: skip
        put(tmp_path / f"{number}", *names.split())
        for look in (check_folders, open_validation if "val" in names else open_training):
            assert sentence in refusal_of(look, tmp_path / f"{number}")
    put(tmp_path / "whole", "train-0-of-2-a09b.tar", "train-1-of-2-13fa.tar", "val-2012.tar")
    check_folders(tmp_path / "whole")


def test_leftover_archives_beside_folders_do_not_matter(tmp_path: Path):
    put_classes(tmp_path, "cat", train=3)
    for name in ("ILSVRC2012_img_train.tar", "train/n01440764.tar"):
        (tmp_path / name).touch()
    assert len(open_training(tmp_path)) == 3
