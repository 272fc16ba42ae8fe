"""Every file decoded: what cannot be is left out of training from then on, and what needs care is told."""

from __future__ import annotations

import errno
import json
import os
from itertools import repeat
from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest
from PIL import Image

from imagenet_fast.data import source
from imagenet_fast.data import verify as verification
from imagenet_fast.data.folders import ImageFolder
from imagenet_fast.data.shards import Shards
from imagenet_fast.data.source import ImageSource, open_training, open_validation
from imagenet_fast.data.verify import summary, verify
from tests.conftest import refusal_of, refuses
from tests.data.encoded import IMAGES, JPEG, deep_png, encoded
from tests.data.prepare import replica
from tests.data.prepare.replica import ODD, Images, small_imagenet
from tests.data.small import as_format, put
from tests.e2e.command import in_process


@pytest.fixture(scope="module")
def images() -> Images:
    odd = {"val/n01440764/moving.jpg": encoded(replica.photo(7, 20, 30), "GIF"), "val/n01440764/deep.png": deep_png(1)}
    return small_imagenet(train=8, val=2) | odd


@pytest.fixture
def data(tmp_path: Path, images: Images) -> Path:
    return replica.image_folder(tmp_path / "data", images)


def scan(root: Path) -> tuple[ImageSource, ImageSource]:
    return open_training(root), open_validation(root)


BAD = {ODD[kind] for kind in ("truncated", "empty", "garbage")}


def test_what_cannot_be_decoded_is_left_out_of_training_wherever_one_stands(data: Path, images: Images, monkeypatch):
    verify(data)
    train, val = scan(data)
    kept = {os.path.relpath(split.name(index), data) for split in (train, val) for index in range(len(split))}
    assert kept == images.keys() - BAD - {ODD["AppleDouble"]}
    monkeypatch.chdir(data)
    assert [len(split) for split in scan(Path())] == [len(train), len(val)] == [31, 10]


def test_verify_finds_bad_files_and_odd_images_on_screen_and_in_json(tmp_path: Path, data: Path):
    json_file = tmp_path / "all.json"
    lines = in_process("data", "verify", "--data", str(data), "--json", str(json_file)).splitlines()
    assert len(lines) < 24
    assert lines[0] == "train  31 images in 4 classes: 5 to 9 in each, median 9"
    assert f"bad: 1 truncated, such as {ODD['truncated']}" in lines
    assert f"`train` and `eval` leave out the bad files; they are listed in {data / 'quarantine.json'}" in lines
    told = json.loads(json_file.read_text())
    assert told["quarantine"].pop(ODD["truncated"]).startswith("truncated: image file is truncated")
    assert told["quarantine"] == {ODD["empty"]: "empty", ODD["garbage"]: "no image"}
    assert told["duplicates"] == [["train/n01443537/n01443537_1.JPEG", ODD["twin"]]]
    assert told["in_both_splits"] == []
    assert told["classes"]["val"] == dict.fromkeys(sorted(replica.CLASSES), 2) | {"n01440764": 4}
    assert told["classes"]["train"]["n01443537"] == 5


def test_shards_are_looked_at_as_folders_are_and_what_is_bad_is_left_out(tmp_path: Path, data: Path, monkeypatch):
    out = as_format(data, "webdataset", tmp_path / "shards", 100_000)
    before, folders = scan(out), verify(data)
    found = verify(out)
    reasons, of_folders = ({what.partition(" (")[0] for what in them.quarantine.values()} for them in (found, folders))
    assert reasons == of_folders
    for name in ("quarantine", "in_both_splits", "duplicates"):
        assert len(getattr(found, name)) == len(getattr(folders, name))
    assert found.classes == folders.classes
    for whole, rest in zip(before, scan(out), strict=True):
        bad = [index for index in range(len(whole)) if os.path.relpath(whole.name(index), out) in found.quarantine]
        kept = [index for index in range(len(whole)) if index not in bad]
        assert [rest.read(index) for index in range(len(rest))] == [whole.read(index) for index in kept]
        assert rest.labels.tolist() == whole.labels[kept].tolist()
    assert sum(map(len, scan(out))) == sum(map(len, before)) - 3
    monkeypatch.chdir(out)
    assert [len(split) for split in scan(Path())] == [len(split) for split in scan(out)]


def test_headers_in_shards_are_read_for_the_names_of_bad_images_alone(tmp_path: Path, data: Path, monkeypatch):
    out = as_format(data, "webdataset", tmp_path / "shards")
    monkeypatch.setattr(Shards, "name", named := create_autospec(Shards.name, return_value="name"))
    verify(out)
    assert named.call_count == 3 + 2, "of three bad images and two with the same bytes"


def test_what_can_be_read_at_last_is_no_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What never can is named, and no fault of its bytes."""
    put(tmp_path / "train/a", *(f"{number}.jpg" for number in range(70)))
    errors = {0: iter([errno.ESTALE]), 1: iter([errno.EIO] * 3), 2: repeat(errno.EACCES), 3: iter([0, 0, errno.ENOMEM])}
    read = ImageFolder.read

    def unsteady(images: ImageFolder, index: int) -> bytes:
        if number := next(errors.get(int(Path(images.name(index)).stem), iter(())), 0):
            raise OSError(number, os.strerror(number))
        return read(images, index)

    monkeypatch.setattr(ImageFolder, "read", unsteady)
    monkeypatch.setattr(source, "_PAUSES_S", (0.0, 0.0))
    told = (
        "train/a/2.jpg cannot be read (Permission denied), and quarantine.json is as it was; put that right, or take "
    )
    assert told in refusal_of(verify, tmp_path)
    del errors[2]
    found = verify(tmp_path)
    assert not found.quarantine
    assert found.classes["train"] == {"a": 70}
    listed = (tmp_path / "quarantine.json").stat()
    assert "train/a/3.jpg cannot be decoded, as there is too little memory; let each" in refusal_of(verify, tmp_path)
    assert (tmp_path / "quarantine.json").stat() == listed, "short memory is no fault of an image, nor ends the list"


def test_a_second_look_finds_what_was_mended(data: Path, images: Images):
    verify(data)
    (data / ODD["truncated"]).write_bytes(images["val/n01443537/ILSVRC2012_val_00000003.JPEG"])
    found = verify(data)
    assert ODD["truncated"] not in found.quarantine
    assert [ODD["truncated"], "val/n01443537/ILSVRC2012_val_00000003.JPEG"] in found.in_both_splits
    assert len(scan(data)[0]) == 32


def test_odd_names_sizes_and_folders_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / "val/a", "0.jpg")
    put(tmp_path / "train/a", "0.jpg")
    put(tmp_path / "train/a", os.fsdecode(b"\xfe.jpg"), content=b"")
    (tmp_path / "train/a/folder.jpg").mkdir()
    assert r"bad: 1 empty, such as train/a/\xfe.jpg" in in_process("data", "verify", "--data", str(tmp_path))
    listed = json.loads((tmp_path / "quarantine.json").read_text())["files"]
    assert list(map(os.fsencode, listed)) == [b"train/a/\xfe.jpg"], "a folder is no image, whatever its name"
    assert [len(split) for split in scan(tmp_path)] == [1, 1]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    put(tmp_path / "val/a", "0.jpg", content=IMAGES["gif"])
    assert verify(tmp_path).quarantine["val/a/0.jpg"].startswith("too large: Image size (9600 pixels) exceeds")


def test_what_has_no_images_or_a_list_that_is_damaged_is_refused(tmp_path: Path, data: Path):
    assert "holds no images in train/<class> or val/<class>" in refusal_of(verify, tmp_path)
    for text in ("", "[]", '{"files": 3}', '{"files": {"a": 1}}'):
        (data / "quarantine.json").write_text(text)
        assert "quarantine.json is damaged; remove it" in refusal_of(scan, data)
    for encoding in ("utf-8-sig", "utf-16"):  # of an editor on Windows
        (data / "quarantine.json").write_text(json.dumps({"files": {ODD["twin"]: "mine"}}), encoding=encoding)
        assert len(scan(data)[0]) == 33


def test_a_class_that_is_all_in_quarantine_is_refused_by_training(data: Path):
    for path in (data / "val/n01440764").iterdir():
        path.write_bytes(b"")
    verify(data)
    refuses(r"val/n01440764: all images are in .*quarantine\.json", scan, data)


def test_read_only_data_is_verified_where_the_json_is_asked_for(tmp_path: Path, data: Path, monkeypatch):
    read_only = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with monkeypatch.context() as patch:
        patch.setattr(verification.tempfile, "TemporaryFile", read_only)
        told = r"quarantine.json cannot be written \(Read-only file system\); .* or give --json FILE, which does with"
        refuses(told, verify, data)
        printed = in_process("data", "verify", "--data", str(data), "--json", str(tmp_path / "all.json"))
    assert json.loads((tmp_path / "all.json").read_text())["quarantine"].keys() == BAD
    assert f"{data / 'quarantine.json'} cannot be written (Read-only file system): `train` will not leave" in printed
    assert not (data / "quarantine.json").exists()


@pytest.mark.parametrize("val", ["val/0.jpg", "val/a/notes.txt"])
def test_a_split_without_class_folders_is_said(val: str, tmp_path: Path):
    found = verify(replica.image_folder(tmp_path, {"train/a/0.jpg": JPEG, val: b""}))
    assert "val    no images in class folders" in list(summary(found, tmp_path))
    assert found.classes["val"] == {}
