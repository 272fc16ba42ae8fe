"""From ImageNet as people have it to folders that loaders read: the same from any source, and after any death."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.data.prepare import output, run, sources
from imagenet_fast.data.prepare.output import alone_in
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.sources import recognise
from imagenet_fast.data.prepare.write import Settings, shrunk_jpeg
from imagenet_fast.data.source import check_folders, open_training
from imagenet_fast.errors import UserError
from tests.conftest import refuses
from tests.data.encoded import encoded
from tests.data.prepare import replica
from tests.data.prepare.replica import ODD, Images, good, named, small_imagenet, tar_of, tree, write_tar
from tests.data.small import WHOLE, as_format
from tests.e2e.command import COMMAND, environment, in_process, wait_for

SMALL = Settings(format="folder", resize=256, quality=95)
TARS = Settings(format="webdataset", resize=256, quality=95, shard_size=40_000)
PIXELS = Settings(format="pixels", resize=256, quality=None, shard_size=10**6)


@pytest.fixture
def own_tars(tmp_path: Path, tars: Path) -> Path:
    """To be spoilt."""
    return Path(shutil.copytree(tars, tmp_path / "tars"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def images_in(out: Path) -> Images:
    return {path: content for path, content in tree(out).items() if path != "prepared.json"}


@pytest.mark.parametrize("lay_out", replica.LAYOUTS)
def test_every_source_becomes_the_same_folders_byte_for_byte(tmp_path: Path, images: Images, lay_out):
    lay_out(tmp_path / "source", images)
    prepare(tmp_path / "source", tmp_path / "out", WHOLE, subset=True)
    assert images_in(tmp_path / "out") == good(images)
    assert names(tmp_path / "out") == ["prepared.json", "train", "val"]


def test_the_devkits_numbers_are_those_of_the_challenge(tmp_path: Path):
    """Of the first ten validation images both the numbers and the wnids are widely known."""
    truth = [490, 361, 171, 822, 297, 482, 13, 704, 599, 164]
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 11)]
    wnids = "n01751748 n09193705 n02105855 n04263257 n03125729 n01735189 n02346627 n02776631 n03794056 n02328150"
    replica.image_folder(tmp_path, {f"val/{name}": b"" for name in names})
    (tmp_path / sources.DEVKIT).write_bytes(replica.devkit(truth))
    classes = recognise(tmp_path).classes
    listed = {file.name: of.name for of in classes for file in of.files()}
    assert listed == dict(zip(names, wnids.split(), strict=True))
    every = Path(sources.__file__).with_name("wnids.txt").read_text().split()
    (timm,) = find_spec("timm").submodule_search_locations  # without importing it, which takes seconds
    assert sorted(every) == Path(timm, "data/_info/imagenet_synsets.txt").read_text().split()


def test_prepare_reports_and_second_call_finds_all_done(tmp_path: Path, tars: Path):
    command = ("data", "prepare", "--source", str(tars), "--out", str(tmp_path / "out"), "--subset")
    printed = in_process(*command)
    assert "now holds:\n  train  34 images in 4 classes\n  val    12 images in" in printed
    assert f"left out, as they are no images: {ODD['AppleDouble']}\n" in printed
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert "holds already" in in_process(*command)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# Shrinking.


def test_large_images_are_made_smaller_and_all_else_is_copied(tmp_path: Path, tars: Path, images: Images):
    prepare(tars, tmp_path / "out", SMALL, subset=True)
    found = images_in(tmp_path / "out")
    assert found.keys() == good(images).keys()
    undecodable = [ODD[kind] for kind in ("truncated", "empty", "garbage")]
    for path, content in found.items():
        if path in undecodable or min((before := Image.open(io.BytesIO(images[path]))).size) <= 256:
            assert content == images[path]
        else:
            after = Image.open(io.BytesIO(content))
            assert (min(after.size), after.format, after.mode) == (256, "JPEG", "RGB")
            assert after.info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
            assert after.width / after.height == pytest.approx(before.width / before.height, rel=0.01)
            difference = np.asarray(before.convert("RGB").resize(after.size), float) - np.asarray(after)
            assert np.abs(difference).mean() < 3  # of 255


# Deaths.


def die_at(change: int, source: Path, out: Path, settings: Settings) -> None:
    """In a process of its own: prepare, and be killed before the how many-eth change of ``out``."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        moves = event in ("os.mkdir", "os.rename", "shutil.rmtree")
        removes = event in ("os.remove", "os.rmdir")  # by names within a folder
        if removes or ((writes or moves) and str(out) in str(arguments[0])):
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    prepare(source, out, settings, subset=True, workers=2)
    (out.parent / "changes").write_text(str(seen))


def attempt(change: int, source: Path, out: Path, settings: Settings) -> bool:
    """Whether it came to its end."""
    process = multiprocessing.get_context("forkserver").Process(target=die_at, args=(change, source, out, settings))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


@pytest.mark.parametrize(
    ("settings", "lay_out", "moments"),
    [
        pytest.param(SMALL, replica.official_tars, 5, id="folders", marks=pytest.mark.ci),
        pytest.param(TARS, replica.official_tars, 3, id="webdataset", marks=pytest.mark.ci),
        pytest.param(PIXELS, replica.parquet, 3, id="pixels of parquet files", marks=pytest.mark.ci),
        pytest.param(SMALL, replica.official_tars, 0, id="folders, at every moment", marks=pytest.mark.weekly),
        pytest.param(TARS, replica.official_tars, 0, id="webdataset, at every moment", marks=pytest.mark.weekly),
    ],
)
def test_killed_again_and_again_the_result_is_that_of_an_undisturbed_run(tmp_path: Path, settings, lay_out, moments):
    source, whole, out = tmp_path / "source", tmp_path / "whole", tmp_path / "out"
    lay_out(source, small_imagenet(train=3, val=1))
    assert attempt(0, source, whole, settings)
    expected, changes = tree(whole), int((tmp_path / "changes").read_text())
    for moment in [changes * n // moments for n in range(1, moments + 1)] if moments else range(1, changes + 1):
        for change in (moment, 1 + moment // 2):  # the second time what the first has left is gone on from
            attempt(change, source, out, settings)
            for path, content in tree(out).items():  # what is in its place is whole
                if path.startswith(("train/", "val/", ".preparing/train/", ".preparing/val/")):
                    assert content == expected[path.removeprefix(".preparing/")]
        prepare(source, out, settings, subset=True)
        assert tree(out) == expected
        shutil.rmtree(out)


@pytest.mark.ci
def test_ctrl_c_ends_cleanly_with_what_is_made_kept(tmp_path: Path):
    slow = encoded(replica.photo(1, 1500, 2000), "JPEG")
    source = replica.image_folder(tmp_path / "source", {"train/a/0.jpg": b"", "train/b/00.jpg": slow})
    for number in range(1, 60):
        os.link(source / "train/b/00.jpg", source / f"train/b/{number:02}.jpg")
    out = tmp_path / "out"
    words = ["data", "prepare", "--source", source, "--out", out, "--subset", "--resize", "256", "--workers", "1"]
    started = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True, env=environment())
    wait_for(lambda: (out / ".preparing/train/a").exists() or started.poll() is not None)
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate()
    assert started.returncode == 130
    assert "stopped; run the same command again to continue\n" in printed
    assert "Traceback" not in printed
    assert names(out) == [".preparing"]
    assert images_in(out / ".preparing/train") == {"a/0.jpg": b""}


def test_parquet_files_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = tmp_path / "source", tmp_path / "out"
    replica.parquet(source, small_imagenet())
    with monkeypatch.context() as patch:
        patch.setattr(run, "pieces_of", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, WHOLE, subset=True)
    first = min(out.glob(".preparing/unpacked/train/*"))
    content = (source / "data/train-00001-of-00005.parquet").read_bytes()
    (source / "data/train-00000-of-00005.parquet").write_bytes(content)  # as fetched anew
    made = Mock(wraps=run.parquet_to_tar)
    monkeypatch.setattr(run, "parquet_to_tar", made)
    refused(source, "has two images of one name")
    assert [call.args[0].name for call in made.call_args_list] == ["train-00000-of-00005.parquet"]
    assert not first.exists()


def test_what_was_made_of_parquet_files_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = tmp_path / "source", tmp_path / "out"
    replica.parquet(source, small_imagenet())
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, "rename", lambda one, to: rename(one, to if to != out / "val" else out / "none/val"))
        with pytest.raises(UserError, match="cannot be written to"):
            prepare(source, out, WHOLE, subset=True)
    assert (out / "train").exists()
    prepare(source, out, WHOLE, subset=True)
    monkeypatch.setattr(run, "parquet_to_tar", None)
    assert prepare(source, out, WHOLE, subset=True).already
    (source / "data/train-00004-of-00005.parquet").write_bytes(b"another")
    refused(source, "was made from another source than .*, by train-00004-of-00005.parquet; give that one")
    replica.image_folder(tmp_path / "folders", small_imagenet())
    refused(tmp_path / "folders", "was made from another source than .*/folders, by train")


# What lies in a source is taken, named or refused.

IMAGE = {"n01440764_1.JPEG": b"an image"}
CATS = {"cat/1.jpg": b"a cat", "dog/1.jpg": b"a dog"}
FLAT = {f"ILSVRC2012_val_{number:08}.JPEG": b"an image" for number in (1, 2)}


def inside(folder: str, files: Any) -> Any:
    return {f"{folder}/{name}": content for name, content in files.items()}


TRAIN = inside("train", CATS)


def train_of(name: str, images: Any = IMAGE) -> Any:
    """A tar that holds one of a class."""
    return {sources.TRAIN: {name: tar_of(images)}}


def laid_out(folder: Path, files: dict[str, Any]) -> Path:
    """Files by their paths, of which some are tars of others."""
    content = {path: tar_of(of) if isinstance(of, dict) else of for path, of in files.items()}
    return replica.image_folder(folder, content)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"train.tar": CATS}, "train.tar is not read: ImageNet's own tars are .*; unpack it to .*train/<class>/"),
        (TRAIN | {"val/1.tar": IMAGE}, "val/1.tar is not read: .*; unpack it to .*val/<class>/"),
        ({"data/train-00000-of-00002.parquet": b""}, "data lacks 1 of the 2 parts like train-00000-of-00002.parquet"),
        ({"ILSVRC2012_img_train.tar.gz": b""}, "ILSVRC2012_img_train.tar.gz is compressed.*unpack it"),
        (TRAIN | {"val/cat.tar.zst": b""}, "val/cat.tar.zst is compressed"),
        (TRAIN | inside("val/photos", FLAT), "a class photos to validate on .* or, if images of many classes"),
        (inside("val/images", FLAT), "val/images is no class's folder; move what is in it up into .*/val"),
        (inside("train/n01440764", IMAGE) | {"train/n01484850.tar": IMAGE}, "n01484850.tar is not unpacked, as others"),
        (train_of("dogs.tar"), "a member 'dogs.tar', which is no class's"),
        (train_of("n1440764.tar"), "a member 'n1440764.tar', which is no class's"),
        (train_of("n99999999.tar") | inside("val", CATS), "a class cat to validate on that train lacks"),
        (train_of("n01440764.tar", {"._1.JPEG": b"", "read.me": b""}), "train/n01440764 has no images in the source"),
        ({f"train/{os.fsdecode(bytes([255]))}/1.jpg": b""}, "which is no name for a class"),
    ],
)
def test_what_is_not_read_or_would_be_left_out_is_refused(tmp_path: Path, files: dict[str, Any], told: str):
    refused(laid_out(tmp_path / "source", files), told)


def test_of_several_forms_of_a_split_the_usual_one_is_taken(tmp_path: Path):
    for number, files in enumerate((
        TRAIN | {"valid/cat/1.jpg": b"", "test/1.jpg": b"", "bbox_val.tgz": b"", "train-0.tar": b""},
        inside("ILSVRC/Data/CLS-LOC", TRAIN) | {"ILSVRC/Annotations/a.xml": b"", "L.csv": b""},
        train_of("n01440764.tar") | TRAIN | {"train.tar.gz": b""},
    )):  # fmt: skip
        source, out = laid_out(tmp_path / f"source{number}", files), tmp_path / f"out{number}"
        prepared = prepare(source, out, WHOLE, subset=True)
        assert {*prepared.record.splits["train"]} in ({"cat", "dog"}, {"n01440764"})


# What is refused.


def refused(source: Path, told: str, settings: Settings = WHOLE, subset: bool = True, **options: Any) -> None:
    """In a sentence; and no split is put into its place, nor anything beside ``out``."""
    out = source.parent / "out"

    def others() -> list[Path]:
        return sorted(path for path in source.parent.rglob("*") if not path.is_relative_to(out))

    before = others(), [name for name in names(out) if name != ".preparing"]
    refuses(told, prepare, source, out, settings, subset=subset, **options)
    assert (others(), [name for name in names(out) if name != ".preparing"]) == before


def test_a_member_that_would_lie_elsewhere_or_is_no_file_is_refused(own_tars: Path):
    plain, val = {"n01440764_1.JPEG": b"an image"}, own_tars / sources.VAL
    whole = val.read_bytes()
    elsewhere = "leads elsewhere|is no plain file"
    for told, member in (
        (elsewhere, named("../escaped.JPEG")),
        (elsewhere, named("/tmp/d-escaped.JPEG")),
        (elsewhere, named("deeper/n01440764_2.JPEG")),
        (elsewhere, named("..", tarfile.DIRTYPE)),
        (elsewhere, named("n01440764_2.JPEG", tarfile.SYMTYPE, "/etc/passwd")),
        (elsewhere, named("n01440764_2.JPEG", tarfile.LNKTYPE, "../other")),
        *((elsewhere, named("n01440764_2.JPEG", kind)) for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z")),
        ("twice", named("n01440764_1.JPEG")),
    ):
        write_tar(own_tars / sources.TRAIN, {"n01440764.tar": tar_of(plain | {"": member})})
        refused(own_tars, told)  # of a class tar
        write_tar(own_tars / sources.TRAIN, {"n01440764_1.JPEG": tar_of(plain), "": member})
        refused(own_tars, told)  # of the outer tar
        write_tar(val, plain | {"": member})
        (own_tars / sources.TRAIN).unlink()
        refused(own_tars, told)
        val.write_bytes(whole)


def test_parquet_files_that_are_damaged_or_do_not_say_the_class_are_refused(tmp_path: Path):
    import pyarrow
    from pyarrow.parquet import write_table

    source = tmp_path / "source"
    replica.parquet(source, {"train/n01440764/n01440764_1.JPEG": b"an image"})
    path = source / "data/train-00000-of-00001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    refused(source, "train-00000-of-00001.parquet is no whole parquet file with a column image")
    write_table(pyarrow.table({"img": [1]}), path)
    refused(source, "train-00000-of-00001.parquet is no whole parquet file with a column image")
    one = {"bytes": b"", "path": "1_n01440764.jpg"}
    for images, told in (
        ([one | {"path": "1.jpg"}], "has an image '1.jpg', whose name does not end in its class"),
        ([one, one], "00001.parquet has two images '1_n01440764.jpg'; give each image a name of its own"),
        ([one, None], "00001.parquet: row 1 has no image or no path; take that row out"),
        ([one | {"bytes": None}, one], "00001.parquet: row 0 has no image or no path"),
        ([], "00001.parquet has no rows; take it out"),
    ):
        write_table(pyarrow.table({"image": images}), path)
        refused(source, told)


def test_a_tar_that_breaks_off_or_is_damaged_is_refused_wherever_it_is(own_tars: Path, images: Images):
    outer = own_tars / sources.TRAIN
    whole = outer.read_bytes()
    inner = tar_of({f"n01440764_{number}.JPEG": bytes(700) for number in range(4)})
    assert len(inner) == 20 * 512

    def damaged(at: int, hole: bytes = b"\xff" * 512) -> bytes:
        return inner[:at] + hole + inner[at + len(hole) :]

    for content, told in (
        (whole[:-30_000], "is no whole tar|breaks off"),
        (whole[:100], "is no whole tar"),
        (b"", "is no whole tar"),
        (b"<html>please log in</html>" * 99, "is no whole tar"),
        (gzip.compress(whole), "is compressed.*unpack it"),
        (tar_of({"n01440764.tar": inner[: 5 * 512]}), "'n01440764.tar' in .* is no whole tar"),
        (tar_of({"n01440764.tar": damaged(0)}), "'n01440764.tar' in .* is no whole tar"),
        (tar_of({"n01440764.tar": damaged(6 * 512)}), "'n01440764.tar' in .* is damaged at byte 3072"),
        (tar_of({"n01440764.tar": damaged(3 * 512, bytes(2048))}), "'n01440764.tar' in .* is damaged at byte 1536"),
    ):
        outer.write_bytes(content)
        refused(own_tars, told)


def test_validation_images_need_a_devkit_that_is_whole_and_knows_them(own_tars: Path):
    kit = own_tars / sources.DEVKIT
    whole = kit.read_bytes()
    for content, told in (
        (whole[: len(whole) // 2], "validation_ground_truth.txt that can be read"),
        (b"not packed", "validation_ground_truth.txt that can be read"),
        (tar_of({}), "validation_ground_truth.txt that can be read .*not found"),
        (replica.devkit([1] * 11), "tar.gz has no class for 'ILSVRC2012_val_00000012.JPEG' in .*val.tar"),
        (replica.devkit([1] * 11 + [1001]), "has 1001 for a label"),
    ):
        kit.write_bytes(content)
        refused(own_tars, told)
    kit.unlink()
    refused(own_tars, "does not say of which class its images are; put ILSVRC2012_devkit_t12.tar.gz, or .*, beside it")


def test_kaggles_images_need_kaggles_table(tmp_path: Path, images: Images):
    source = tmp_path / "source"
    replica.kaggle(source, images)
    table = source / "LOC_val_solution.csv"
    table.write_text(table.read_text().replace("ILSVRC2012_val_00000003,", "another,"))
    refused(source, "has no class for .*ILSVRC2012_val_00000003.JPEG")
    table.write_text("id,label\n")
    refused(source, "has not the columns ImageId,PredictionString")
    table.unlink()
    refused(source, "does not say of which class its images are; put .* Kaggle's LOC_val_solution.csv, beside it")


def test_prepare_refuses_unknown_source(tmp_path: Path):
    (tmp_path / "source").mkdir()
    refused(tmp_path / "source", "neither ILSVRC2012_img_train.tar .* nor ILSVRC/Data/CLS-LOC/train .* nor train/<cl")
    refused(tmp_path / "nowhere", "there is no directory")


def test_what_cannot_be_read_in_a_folder_is_named(tmp_path: Path):
    source = replica.image_folder(tmp_path / "source", {"train/a/0.jpg": b"", "train/a/note.txt": b""})
    os.mkfifo(source / "train/a/pipe.jpg")
    refused(source, "pipe.jpg is neither a file nor a folder")
    (source / "train/a/pipe.jpg").unlink()
    (source / "train/a/link.jpg").symlink_to("nowhere")
    refused(source, "link.jpg is neither a file nor a folder, or a link that leads nowhere")


def test_less_than_imagenet_is_refused_unless_it_is_meant(own_tars: Path, monkeypatch: pytest.MonkeyPatch):
    refused(own_tars, "has 4 classes of train, and ImageNet has 1000; .* --subset", subset=False)
    monkeypatch.setattr(run, "CLASSES", 4)
    refused(own_tars, "has 34 images of train, and ImageNet has 1281167", subset=False, md5=False)
    monkeypatch.setattr(run, "IMAGES", {"train": 34, "val": 12})
    assert not prepare(own_tars, own_tars.parent / "out", WHOLE, md5=False).already


def test_archives_are_checked_by_md5_once(own_tars: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "CLASSES", 4)
    refused(own_tars, "train.tar is not what image-net.org gives: its md5 is [0-9a-f]{32}, not 1d675b", subset=False)
    md5 = {name: hashlib.md5((own_tars / name).read_bytes()).hexdigest() for name in sources.MD5}
    monkeypatch.setattr(run, "MD5", md5)
    monkeypatch.setattr(run, "IMAGES", {"train": 33, "val": 12})
    refused(own_tars, "has 34 images of train", subset=False)
    monkeypatch.setattr(run, "_PART", None)  # nothing can be read by it
    monkeypatch.setattr(run, "IMAGES", {"train": 34, "val": 12})
    prepare(own_tars, own_tars.parent / "out", WHOLE)


def test_classes_to_validate_on_are_those_of_training(own_tars: Path, images: Images, capsys: Any):
    write_tar(own_tars / sources.TRAIN, {"n01440764.tar": tar_of({"n01440764_1.JPEG": b"an image"})})
    prepare(own_tars, own_tars.parent / "out", WHOLE, subset=True)
    assert "warning: 3 classes are left out of val, as train lacks them, the first n01443537" in capsys.readouterr().err
    assert names(own_tars.parent / "out/val") == ["n01440764"]


# What is there already.


def test_what_was_made_otherwise_is_not_mixed_with_it(own_tars: Path, images: Images):
    out = own_tars.parent / "out"
    prepare(own_tars, out, WHOLE, subset=True)
    refused(own_tars, "was prepared with --format folder, not with --format folder --resize 256 --quality 95", SMALL)
    another = replica.official_tars(own_tars.parent / "another", small_imagenet(train=9))
    refused(another, "was made from another source than .*another, by train/n01440764")
    (out / "train/n01443537/n01443537_2.JPEG").unlink()
    refused(own_tars, "train/n01443537 has not the 8 images any more that were put there; remove .*/out/train")
    shutil.rmtree(out / "train")
    prepare(own_tars, out, WHOLE, subset=True)
    assert images_in(out) == good(images)
    (out / "prepared.json").write_text("{")
    refused(own_tars, "prepared.json is damaged")
    (out / "prepared.json").unlink()
    refused(own_tars, "out/train is there already, and not from `data prepare`")


def test_one_process_at_a_time(own_tars: Path):
    with alone_in(own_tars.parent / "out"):
        refused(own_tars, "is being prepared by another process")
    prepare(own_tars, own_tars.parent / "out", WHOLE, subset=True)


# The disk.


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(own_tars: Path, monkeypatch: pytest.MonkeyPatch):
    def disk(free: int) -> None:
        usage = shutil.disk_usage(own_tars)._replace(free=free)
        monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage)

    disk(100_000)
    for settings in (WHOLE, TARS.model_copy(update={"resize": None, "quality": None})):
        told = r"need \d+.\d kB, and the disk of .* has 100.0 kB free: \d+.\d kB are missing; free them"
        refused(own_tars, told, settings)
    large = encoded(replica.photo(1, 900, 1200), "JPEG")
    source = replica.image_folder(own_tars.parent / "large", {f"train/a/{number}.jpg": large for number in range(6)})
    refused(source, r"as pixels, and the disk of .* has 100.0 kB free", PIXELS.model_copy(update={"resize": None}))
    disk(1000)
    refused(source, r"at --resize 256, by a sample of them, and the disk of .* has 1.0 kB free", SMALL)
    disk(4 * len(large))
    prepare(source, own_tars.parent / "out", SMALL, subset=True)  # shrunk, they have room


def test_a_disk_that_fills_up_is_named_and_what_is_made_is_kept(own_tars: Path, monkeypatch: pytest.MonkeyPatch):
    usual = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if "n02105855" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(path, *arguments, **options)

    told = "out cannot be written to .No space left on device.; put that right"
    with monkeypatch.context() as patch:
        patch.setattr(output, "atomic_write_text", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        refused(own_tars, told)  # before anything is made
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        refused(own_tars, told, workers=1)
    assert (own_tars.parent / "out/.preparing/train/n01440764").is_dir()
    prepare(own_tars, own_tars.parent / "out", WHOLE, subset=True)


def test_options_that_make_no_sense_are_refused(tmp_path: Path, tars: Path, refusal: Callable[..., str]):
    for options, told in (
        ("--quality 90", "--quality is of the JPEG files that --resize makes"),
        ("--quality 90 --resize 64 --format pixels", "--quality is of the JPEG files that --resize makes"),
        ("--out /proc/nothing", "--out /proc/nothing cannot be made"),
        ("--shard-size 150MB", "--shard-size is of shards; give --format webdataset too"),
        ("--format webdataset --shard-size 0", "--shard-size 0 is no size above 0; write for example 150MB"),
        ("--format webdataset --shard-size many", "--shard-size many is no size above 0"),
    ):
        places = ("--source", str(tars), "--out", str(tmp_path / "out"))
        assert told in refusal("data", "prepare", *places, *options.split())


def test_a_grey_image_stays_grey_and_carries_nothing_along():
    grey = encoded(replica.photo(1, 300, 400).convert("L"), "PNG", icc_profile=b"x" * 99)
    small = Image.open(io.BytesIO(shrunk_jpeg(grey, 128, 95)))
    assert (small.size, small.mode, small.info.get("icc_profile")) == ((170, 128), "L", None)


def test_an_image_beside_class_folders_does_not_make_them_kaggles(tmp_path: Path, images: Images):
    source = replica.image_folder(tmp_path / "source", images)
    shutil.copy(next(source.glob("val/*/*")), source / "val/stray.JPEG")
    found = recognise(source)
    assert {of.name for of in found.classes} == {*replica.CLASSES}
    assert found.apart == ["val/stray.JPEG"]


@pytest.mark.parametrize("lost", [0, -1])
def test_shards_missing_at_an_end_are_missed(lost: int, tmp_path: Path, images: Images):
    """An interrupted copy lacks the last ones, and their names do not say how many there were."""
    out = as_format(replica.image_folder(tmp_path / "source", images), "webdataset", tmp_path / "out", 100_000)
    shards = sorted(out.glob("train/*.tar"))
    assert len(shards) > 2
    check_folders(out)
    shards[lost].unlink()
    told = rf"lacks 1 of the shards that .*prepared.json lists, such as {shards[lost].name}"
    for look in (check_folders, open_training):
        refuses(told, look, out)
    (out / "prepared.json").unlink()
    assert len(open_training(out)) > 0, "a part that is meant"
