"""From ImageNet as people have it to shards: the same bytes from any source, by any number of workers."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagenet_fast.data.prepare import write
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.data.source import ImageSource, open_training, open_validation
from tests.conftest import refuses
from tests.data.prepare import replica
from tests.data.prepare.replica import ODD, Images, good, small_imagenet, tree
from tests.data.small import FORMATS, WHOLE

SHARD = 80_000  # bytes; the largest image has 74 kB
WEBDATASET = Settings(format="webdataset", resize=None, quality=None, shard_size=SHARD)
ALL = pytest.mark.parametrize("settings", [WHOLE, WEBDATASET], ids=FORMATS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def contents(split: ImageSource) -> list[tuple[str, bytes]]:
    """Class and bytes of each image, in their order."""
    return [(split.classes[label], split.read(index)) for index, label in enumerate(split.labels.tolist())]


def expected(images: Images, split: str) -> list[tuple[str, bytes]]:
    """In the order of folders."""
    paths = sorted(path for path in good(images) if path.startswith(f"{split}/"))
    return [(path.split("/")[1], images[path]) for path in paths]


def test_shards_hold_every_image_and_are_mixed(tars: Path, out: Path, images: Images):
    prepare(tars, out, WEBDATASET, subset=True)
    train, val = open_training(out), open_validation(out)
    assert train.classes == val.classes == sorted(replica.CLASSES)
    assert Counter(contents(train)) == Counter(expected(images, "train"))
    assert contents(val) == expected(images, "val")
    assert {path.name for path in out.iterdir()} == {
        "train", "val", "classes.txt", "prepared.json", ".imagenet-fast-train.index", ".imagenet-fast-val.index",
    }  # fmt: skip
    changes = sum(a != b for a, b in zip(train.labels, train.labels[1:], strict=False))
    assert changes > len(train) // 2  # of class; sorted by it there would be 3


def test_shards_are_deterministic(tmp_path: Path, tars: Path, out: Path, images: Images):
    prepare(tars, out, WEBDATASET, subset=True, workers=3)
    source, again = tmp_path / "kaggle", tmp_path / "again"
    replica.kaggle(source, images)
    prepare(source, again, WEBDATASET, subset=True, workers=1)
    first, second = tree(out), tree(again)
    assert first.pop("prepared.json") != second.pop("prepared.json")
    assert first == second


def test_a_shard_has_the_size_asked_for_also_where_images_are_shrunk(tars: Path, out: Path):
    prepare(tars, out, WEBDATASET, subset=True)
    assert max(held(out, "train")) <= SHARD
    assert len(held(out, "train")) <= 2 * sum(held(out, "train")) / SHARD
    small = out.with_name("small")
    record = prepare(tars, small, WEBDATASET.model_copy(update={"resize": 64, "quality": 80}), subset=True).record
    folders = out.with_name("folders")
    prepare(tars, folders, Settings(format="folder", resize=64, quality=80), subset=True)
    for look in (open_training, open_validation):
        assert Counter(contents(look(small))) == Counter(contents(look(folders)))
    sizes = held(small, "train")
    assert sum(sizes) < sum(held(out, "train")) / 2
    assert len(sizes) < len(held(out, "train"))
    assert record.others == (ODD["AppleDouble"],)


def held(out: Path, split: str) -> list[int]:
    """The bytes of images in each shard."""
    train = open_training(out)
    by_shard: Counter[str] = Counter()
    for index in range(len(train)):
        by_shard[train.name(index).partition(": ")[0]] += len(train.read(index))
    return list(by_shard.values())


def test_images_larger_than_a_shard_have_one_each(tars: Path, out: Path):
    prepare(tars, out, WEBDATASET.model_copy(update={"shard_size": 1}), subset=True)
    assert len(held(out, "train")) == 34 - 1, "but an empty one, which takes no room"


# What is there already.


def refused(source: Path, out: Path, told: str, settings: Settings) -> None:
    before = tree(out)
    refuses(told, prepare, source, out, settings, subset=True)
    shutil.rmtree(out / ".preparing", ignore_errors=True)
    assert tree(out) == before


def test_what_was_made_otherwise_is_not_mixed_with_it(tars: Path, out: Path):
    prepare(tars, out, WEBDATASET, subset=True)
    was = f"was prepared with --format webdataset --shard-size {SHARD}B, not with"
    larger = WEBDATASET.model_copy(update={"shard_size": SHARD + 1})
    refused(tars, out, f"{was} --format webdataset --shard-size {SHARD + 1}B; give the same, or another --out", larger)
    assert prepare(tars, out, WEBDATASET, subset=True).already
    shard = out / "train/train-000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(tars, out, rf"train-000001.tar has not the {len(whole)} bytes any more .* remove .*/out/train", WEBDATASET)
    (out / "val/val-000000.tar").unlink()
    shutil.rmtree(out / "train")
    refused(tars, out, r"val-000000.tar has not the", WEBDATASET)
    shutil.rmtree(out / "val")
    prepare(tars, out, WEBDATASET, subset=True)
    assert shard.read_bytes() == whole


@ALL
def test_the_other_split_may_come_later_if_it_has_the_same_classes(tmp_path, out: Path, images: Images, settings):
    source = replica.image_folder(tmp_path / "source", images)
    prepare(source, tmp_path / "at once", settings, subset=True)
    (source / "train").rename(tmp_path / "train")
    prepare(source, out, settings, subset=True)
    for place in (out, tmp_path / "at once"):
        assert contents(open_validation(place)) == expected(images, "val")
    (tmp_path / "train").rename(source / "train")
    if settings is not WHOLE:
        replica.image_folder(source, {"train/n00000001/0.jpg": b"more"})
        refused(source, out, "classes.txt names other classes than are to be written there", settings)
        shutil.rmtree(source / "train/n00000001")
    shutil.rmtree(source / "val")
    prepare(source, out, settings, subset=True)
    assert tree(out) == tree(tmp_path / "at once")


def test_half_of_another_source_is_refused(tmp_path: Path, tars: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("imagenet_fast.data.prepare.run.write_classes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(tars, out, WEBDATASET, subset=True)
    another = replica.official_tars(tmp_path / "another", small_imagenet(train=9))
    told = r"out was begun from another source than .*another, by train/.* or remove"
    refuses(told, prepare, another, out, WEBDATASET, subset=True)
    monkeypatch.setattr(write, "write_tar", None)  # nothing is made again
    prepare(tars, out, WEBDATASET, subset=True)
