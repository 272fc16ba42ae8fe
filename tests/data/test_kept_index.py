"""An index is made once, kept, and believed only as long as it is whole and of what is there."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from imagenet_fast.data.formats.kept_index import Index, Kind, keep_index, stamps_of
from imagenet_fast.data.formats.making_shards import Sample, write_records, write_tar
from imagenet_fast.data.imagefolder import scan_training
from imagenet_fast.data.recognising import open_training
from imagenet_fast.errors import UserError

KIND = Kind("test", {"numbers": "<i8"})
NAME = ".imagenet-fast-train.index"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(place))
    return place


def kept(root: Path, made: list[int] | None = None, fill: int = 1) -> list[int]:
    """The numbers in the index of all ``*.data`` files under ``root``; ``made`` grows when it is made."""

    def make() -> Index:
        (made if made is not None else []).append(fill)
        return Index({"fill": fill}, {"numbers": np.full(100, fill)})

    files = sorted(root.glob("*.data"))
    return keep_index(root, "train", KIND, lambda: stamps_of(root, files), make).columns["numbers"].tolist()


def test_an_index_is_made_once(tmp_path: Path):
    (tmp_path / "a.data").touch()
    made: list[int] = []
    assert kept(tmp_path, made) == kept(tmp_path, made, fill=2) == [1] * 100
    assert made == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"a.data", NAME}


@pytest.mark.parametrize("change", ["size", "time", "name", "more", "fewer"])
def test_where_files_have_changed_it_is_made_anew_with_a_line(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
):
    for name in "ab":
        (tmp_path / f"{name}.data").write_text("1")
    kept(tmp_path)
    assert capsys.readouterr().err == ""
    match change:
        case "size":
            (tmp_path / "a.data").write_text("12")
        case "time":
            (tmp_path / "a.data").write_text("2")
        case "name":
            (tmp_path / "a.data").rename(tmp_path / "c.data")
        case "more":
            (tmp_path / "c.data").touch()
        case "fewer":
            (tmp_path / "a.data").unlink()
    assert kept(tmp_path, fill=2) == kept(tmp_path, fill=3) == [2] * 100
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path / NAME} is of files that have changed since; it is made anew" in said


def test_whatever_lies_in_its_place_is_believed_only_if_it_is_whole(tmp_path: Path):
    """Every kind of damage that a disk does, and files of others."""
    (tmp_path / "a.data").touch()
    kept(tmp_path)
    place = tmp_path / NAME
    whole = place.read_bytes()
    drawn = random.Random(0)
    others = [whole[:cut] for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1)]
    others += [b"garbage", bytes(2000), whole[100:], b"PK\x03\x04" + bytes(90)]
    for _ in range(40):
        at = drawn.randrange(len(whole))
        others.append(whole[:at] + bytes([whole[at] ^ 1 << drawn.randrange(8)]) + whole[at + 1 :])
    np.save(tmp_path / "array.npy", np.arange(3))
    others.append((tmp_path / "array.npy").read_bytes())
    np.savez(tmp_path / "other.npz", about=np.frombuffer(b"[]", np.uint8), numbers=np.arange(3))
    others.append((tmp_path / "other.npz").read_bytes())
    for content in others:
        place.write_bytes(content)
        assert kept(tmp_path, fill=1) == [1] * 100
    place.write_bytes(whole)
    assert kept(tmp_path, fill=2) == [1] * 100


def test_an_index_of_another_format_is_not_taken_for_ones_own(tmp_path: Path):
    """Where shards were replaced by shards of another kind."""
    sample = Sample("a.jpg", b"picture", 0)
    write_tar(tmp_path / "train-0.tar", [(0, sample)])
    assert open_training(tmp_path).read(0) == b"picture"
    (tmp_path / "train-0.tar").unlink()
    write_records(tmp_path / "train-00000-of-00001", [sample], ["cat"])
    assert open_training(tmp_path).read(0) == b"picture"


def test_data_that_cannot_be_written_has_its_index_in_the_cache(tmp_path: Path, cache: Path):
    (tmp_path / "a.data").touch()
    (tmp_path / f"{NAME}.partial").mkdir()  # even for root
    made: list[int] = []
    assert kept(tmp_path, made) == kept(tmp_path, made, fill=2) == [1] * 100
    assert len(list((cache / "indexes").iterdir())) == 1
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    assert kept(other, made, fill=3) == [3] * 100, "another directory's is another"
    assert made == [1, 3]


def test_where_nothing_can_be_kept_the_data_is_read_all_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / f"{NAME}.partial").mkdir()
    (cache / "indexes").write_text("no folder")
    assert kept(tmp_path) == [1] * 100
    assert kept(tmp_path, fill=2) == [2] * 100
    for name in ("IMAGENET_FAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert kept(tmp_path, fill=3) == [3] * 100


def test_nothing_is_kept_of_an_index_whose_making_fails(tmp_path: Path):
    def make() -> Index:
        raise UserError("a bad shard")

    for _ in range(2):
        with pytest.raises(UserError, match="a bad shard"):
            keep_index(tmp_path, "train", KIND, list, make)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{NAME}.partial").write_text("of one that was killed")
    assert kept(tmp_path) == [1] * 100
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def _race(root: Path, log: Path, number: int) -> list[int]:
    def make() -> Index:
        with log.open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.3)
        return Index({}, {"numbers": np.full(100, number)})

    files = sorted(root.glob("*.data"))
    return keep_index(root, "train", KIND, lambda: stamps_of(root, files), make).columns["numbers"].tolist()


def test_one_process_of_many_makes_it_and_the_others_wait(tmp_path: Path):
    """First with nothing there, then with what has become stale."""
    data = tmp_path / "data"
    data.mkdir()
    with ProcessPoolExecutor(4, multiprocessing.get_context("forkserver")) as processes:
        for content in ("1", "12"):
            (data / "a.data").write_text(content)
            log = tmp_path / f"log {content}"
            found = list(processes.map(_race, repeat(data), repeat(log), range(12)))
            made = log.read_text().split()
            assert len(made) == 1
            assert found == [[int(made[0])] * 100] * 12
    assert {path.name for path in data.iterdir()} == {"a.data", NAME}


def test_a_listing_is_remembered_until_a_folder_changes(tmp_path: Path):
    for name in ("cat", "dog"):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.jpg").touch()
    before = scan_training(tmp_path)
    written = (tmp_path / NAME).stat().st_ino
    assert scan_training(tmp_path).names == before.names
    assert (tmp_path / NAME).stat().st_ino == written
    changes = (
        lambda: (tmp_path / "train" / "dog" / "0.jpg").touch(),
        lambda: (tmp_path / "train" / "cat" / "1.jpg").rename(tmp_path / "train" / "dog" / "2.jpg"),
        lambda: shutil.copytree(tmp_path / "train" / "dog", tmp_path / "train" / "bird"),
        lambda: shutil.rmtree(tmp_path / "train" / "dog") or shutil.rmtree(tmp_path / "val" / "dog"),
    )
    expected = (["cat/1", "dog/0", "dog/1"], None, ["bird/0", "bird/1", "bird/2"], ["bird/0", "bird/1", "bird/2"])
    for number, (change, names) in enumerate(zip(changes, expected, strict=True)):
        change()
        if number == 1:
            with pytest.raises(UserError, match="cat holds no images"):
                scan_training(tmp_path)
            (tmp_path / "train" / "cat" / "3.jpg").touch()
            names = ["cat/3", "dog/0", "dog/1", "dog/2"]
        train = scan_training(tmp_path)
        told = [str(Path(train.name(i)).relative_to(tmp_path / "train").with_suffix("")) for i in range(len(train))]
        assert told[: len(names)] == names
        assert [train.classes[label] for label in train.labels] == [name.split("/")[0] for name in told]
