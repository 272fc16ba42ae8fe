"""An index is made once, kept, and believed only as long as it is whole and of what is there."""

from __future__ import annotations

import io
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import tests
from imagenet_fast.data.folders import scan_split
from imagenet_fast.data.index import Index, load_or_build_index
from imagenet_fast.data.prepare.write import Sample, write_tar
from imagenet_fast.data.source import open_training
from imagenet_fast.distributed.messages import first_of_node
from imagenet_fast.errors import UserError
from tests.conftest import refusal_of
from tests.corruption import corrupted
from tests.data.small import put, put_classes
from tests.ranks import with_ranks

COLUMNS = {"numbers": "<i8"}
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
    return load_or_build_index(root, "train", COLUMNS, files, make).columns["numbers"].tolist()


def test_where_files_have_changed_it_is_made_anew(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.data").write_text("1")
    kept(tmp_path)
    a, c = tmp_path / "a.data", tmp_path / "c.data"
    changes = {
        "size": lambda: a.write_text("12"), "time": lambda: a.write_text("21"), "name": lambda: a.rename(c),
        "more": a.touch, "fewer": c.unlink,
    }  # fmt: skip
    for number, (what, change) in enumerate(changes.items(), 2):
        change()
        assert kept(tmp_path, fill=number) == kept(tmp_path, fill=99) == [number] * 100, what


def test_an_index_with_other_columns_is_not_taken_for_ones_own(tmp_path: Path):
    for other in ({"names": "<i8"}, {"numbers": "<i4"}):
        kept(tmp_path)
        made = Index({}, {name: np.zeros(3, dtype) for name, dtype in other.items()})
        assert load_or_build_index(tmp_path, "train", other, [], lambda made=made: made) is made


def test_data_that_cannot_be_written_has_its_index_in_the_cache(tmp_path: Path, cache: Path):
    (tmp_path / "a.data").touch()
    (tmp_path / NAME).mkdir()  # which no file replaces, even for root
    made: list[int] = []
    assert kept(tmp_path, made) == kept(tmp_path, made, fill=2) == [1] * 100
    assert len(list((cache / "indexes").iterdir())) == 1
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    assert kept(other, made, fill=3) == [3] * 100, "another directory's is another"
    assert made == [1, 3]


def test_where_nothing_can_be_kept_the_data_is_read_all_the_same(tmp_path: Path, cache: Path, monkeypatch):
    (tmp_path / NAME).mkdir()
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
        assert refusal_of(load_or_build_index, tmp_path, "train", COLUMNS, [], make) == "a bad shard"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.ci)])
def test_whatever_lies_in_its_place_is_believed_only_if_it_is_whole(tmp_path: Path, seeds: int):
    """Every kind of damage that a disk does, and files of others."""
    (tmp_path / "a.data").touch()
    kept(tmp_path)
    place = tmp_path / NAME
    whole = place.read_bytes()
    array, other = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3))
    np.savez(other, about=np.frombuffer(b"[]", np.uint8), numbers=np.arange(3))
    damaged = [corrupted(whole, random.Random(seed)) for seed in range(seeds)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :] for at in range(0, len(whole), 17)]
    for content in (*damaged, b"", whole[:-1], whole[100:], b"PK" + bytes(90), array.getvalue(), other.getvalue()):
        place.write_bytes(content)
        assert kept(tmp_path, fill=1) == [1] * 100
    place.write_bytes(whole)
    assert kept(tmp_path, fill=2) == [1] * 100


@with_ranks(3)
def test_the_first_rank_of_a_node_makes_it_and_the_others_read_it(tmp_path: Path) -> None:
    world, made = tests.world(), list[int]()
    with first_of_node(world):
        if world.is_local_main:
            (tmp_path / "a.data").touch()
        assert kept(tmp_path, made, fill=7 + world.rank) == [7] * 100
    assert made == [7] * world.is_local_main


@with_ranks(2)
def test_what_is_wrong_with_the_images_is_told_by_every_rank(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no images"), first_of_node(tests.world()):
        scan_split(put(tmp_path, "train/a/notes.txt", "val/a/notes.txt"), "train")


def test_a_listing_is_remembered_until_a_folder_changes(tmp_path: Path):
    put_classes(tmp_path, "cat", "dog")
    before = scan_split(tmp_path, "train")
    written = (tmp_path / NAME).stat().st_ino
    assert scan_split(tmp_path, "train").names == before.names
    assert (tmp_path / NAME).stat().st_ino == written

    def listed() -> list[str]:
        train = scan_split(tmp_path, "train")
        told = [str(Path(train.name(i)).relative_to(tmp_path / "train").with_suffix("")) for i in range(len(train))]
        assert [train.classes[label] for label in train.labels] == [name.split("/")[0] for name in told]
        return told

    (tmp_path / "train" / "dog" / "1.jpg").touch()
    assert listed() == ["cat/0", "dog/0", "dog/1"]
    (tmp_path / "train" / "cat" / "0.jpg").rename(tmp_path / "train" / "dog" / "2.jpg")
    assert "cat holds no images" in refusal_of(scan_split, tmp_path, "train")
    (tmp_path / "train" / "cat" / "3.jpg").touch()
    assert listed() == ["cat/3", "dog/0", "dog/1", "dog/2"]


def test_a_copy_that_is_completed_with_its_old_times_is_listed_again(tmp_path: Path):
    """As rsync -a does it: the times of folders are those of the source, whatever came into them since."""
    put_classes(tmp_path, "cat", "dog", train=2)
    before = {path: path.stat() for path in [tmp_path, *tmp_path.rglob("*")]}
    assert len(scan_split(tmp_path, "train")) == 4
    put(tmp_path / "train/cat", "3.jpg", "4.jpg")
    for path, old in before.items():
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert len(scan_split(tmp_path, "train")) == 6


def test_a_shard_that_is_changed_in_place_with_its_old_time_is_read_again(tmp_path: Path):
    shard = tmp_path / "train-0.tar"
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    write_tar(shard, [(0, Sample("a.jpg", b"image", 0))])
    assert open_training(tmp_path).labels.tolist() == [0]
    old = shard.stat()
    write_tar(tmp_path / "other", [(0, Sample("a.jpg", b"image", 1))])
    shard.write_bytes((tmp_path / "other").read_bytes())
    assert shard.stat().st_size == old.st_size
    os.utime(shard, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert open_training(tmp_path).labels.tolist() == [1]
