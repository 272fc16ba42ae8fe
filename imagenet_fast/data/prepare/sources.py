"""Recognise what a directory holds of each split: ImageNet's own tars, folders, or parquet files."""

from __future__ import annotations

import csv
import os
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

from imagenet_fast.data.folders import FolderContents, class_folders, is_image_name, list_folder, shown
from imagenet_fast.data.index import map_in_order
from imagenet_fast.data.prepare.files import SPLITS, Source, SourceClass, SourceFile, members
from imagenet_fast.data.source import WORDS, SplitName, check_parts, files_of, in_sentences, refuse_packed
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.load import read_text

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"

MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}
"""The md5 of each file, as image-net.org and torchvision publish them."""

_KAGGLE = Path("ILSVRC/Data/CLS-LOC")
_SOLUTION = "LOC_val_solution.csv"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_MOST = 1 << 20  # bytes of it; it has some 200 kB
_WNID = re.compile(r"n\d{8}")
_CLASS_TAR = re.compile(rf"({_WNID.pattern})\.tar")


@in_sentences()
def recognise(folder: Path) -> Source:
    """Return the source in ``folder``. Raises UserError if the layout is not known, or the source is damaged."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}; give the one that holds ImageNet with --source DIR")
    for root in (folder, folder / "data", folder / _KAGGLE, folder / _KAGGLE.relative_to("ILSVRC")):
        if found := [of_split for split in SPLITS if (of_split := _split(root, split)) is not None]:
            return reduce(Source.__add__, found)
    raise UserError(
        f"{folder} holds no ImageNet that is known: neither {TRAIN} or {VAL} (with {DEVKIT}), nor {_KAGGLE}/train as "
        "Kaggle has it, nor train/<class>/* and val/<class>/*, nor train/n01440764.tar and the like, nor "
        "data/train-*.parquet; give the directory that does with --source DIR"
    )


def _split(root: Path, split: SplitName) -> Source | None:
    """Return one split, if it is there: as its official tar, else in a folder of its name, else in parquet files."""
    if split == "train" and (root / TRAIN).is_file():
        return _in_train_tar(root / TRAIN)
    if split == "val" and (root / VAL).is_file():
        return _by_table(members(root / VAL), root / VAL)
    folders = [root / word for word in WORDS[split] if (root / word).is_dir()]
    for contents in map(list_folder, folders):
        if split == "val" and contents.images and not contents.folders:
            return _by_table(_files(contents.path), contents.path)
        if contents.folders or contents.images:
            return _in_folders(root, split, contents)
        if any(map(_CLASS_TAR.fullmatch, contents.others)):
            return _in_class_tars(split, contents)
    paths, _ = files_of(root, split, folders)
    refuse_packed(paths)
    if parquet := [path for path in paths if path.suffix == ".parquet"]:
        check_parts(parquet, split)
        return Source([], parquet=[(split, path) for path in parquet])
    if tars := [path for path in paths if path.suffix == ".tar"]:
        raise UserError(
            f"{tars[0]} is not read: ImageNet's own tars are {TRAIN} and {VAL} in {root}, and train/n01440764.tar and "
            f"the like; unpack it to {root / split}/<class>/*"
        )
    return None


# Archives.


def _in_train_tar(tar: Path) -> Source:
    """Return the classes in the official tar of training images, which holds a tar of each."""
    classes = []
    for file in members(tar):
        if (named := _CLASS_TAR.fullmatch(file.name)) is None:
            raise UserError(
                f"{tar} has a member '{file.name}', which is no class's; it must hold n01440764.tar and the like"
            )
        classes.append(SourceClass("train", named[1], partial(members, tar, file), file.size))
    return Source(classes, archives=[tar])


def _in_class_tars(split: SplitName, contents: FolderContents) -> Source:
    """Return the classes in a folder of class tars, into which the official tar was unpacked."""
    source = Source([])
    for name in contents.others:
        tar = contents.path / name
        if named := _CLASS_TAR.fullmatch(name):
            source.classes.append(SourceClass(split, named[1], partial(members, tar), tar.stat().st_size))
        elif not name.startswith("."):
            source.others.append(f"{split}/{shown(name)}")
    return source


def in_unpacked(tars: list[Path]) -> Source:
    """Return the classes in tars that ``parquet_to_tar`` has made in folders of the splits; all may hold any class."""
    by_class = defaultdict[tuple[str, str], list[SourceFile]](list)
    for tar in tars:
        for file in members(tar):
            wnid, _, name = file.name.partition(".")
            by_class[tar.parent.name, wnid].append(replace(file, name=name))
    return Source([_listed_class(*named, files) for named, files in by_class.items()])


def _listed_class(split: str, name: str, files: list[SourceFile]) -> SourceClass:
    return SourceClass(split, name, partial(list, files), sum(file.size for file in files))


# Folders.


def _in_folders(root: Path, split: SplitName, contents: FolderContents) -> Source:
    """Return the split in one folder a class."""
    folder = contents.path
    others = [f"{split}/{shown(name)}" for name in contents.others if not name.startswith(".")]
    source = Source([], others, [f"{split}/{shown(name)}" for name in contents.images])

    def look(name: str) -> tuple[list[SourceFile], list[str]]:
        inside = list_folder(folder / name)
        if deeper := inside.deeper():
            inside.require_images()
        below = os.path.relpath(inside.path, root)
        return _files(inside.path), [os.path.join(below, path) for path in deeper]  # noqa: PTH118

    names = class_folders(folder)
    if packed := [name for name in contents.others if _CLASS_TAR.fullmatch(name) and name[:-4] not in names]:
        raise UserError(f"{folder / packed[0]} is not unpacked, as others beside it are; unpack it, or remove theirs")
    if len(names) == 1 and names[0] in ("images", *WORDS[split]):
        raise UserError(f"{folder / names[0]} is no class's folder; move what is in it up into {folder}")
    for name, (files, deeper) in zip(names, map_in_order(look, names), strict=True):
        if not name.isprintable():
            raise UserError(f"{folder} has a folder {name!r}, which is no name for a class; rename it")
        source.classes.append(_listed_class(split, name, files))
        source.apart.extend(map(shown, deeper))
    return source


def _files(folder: Path) -> list[SourceFile]:
    """Return the files in ``folder``, with links followed. Raises UserError for what is neither file nor folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                continue
            if not entry.is_file():
                raise UserError(f"{entry.path} is neither a file nor a folder, or a link that leads nowhere; remove it")
            found.append(SourceFile(entry.name, entry.path, 0, entry.stat().st_size))
    return found


# Images whose class a table tells.


def _by_table(files: list[SourceFile], place: Path) -> Source:
    """Return the classes to validate on of images that lie together in ``place``, a tar or a folder."""
    found = _table(place)
    if found is None:
        raise UserError(
            f"{place} does not say of which class its images are; put {DEVKIT}, or Kaggle's {_SOLUTION}, beside it"
        )
    table, read = found
    classes, by_class = read(table), defaultdict[str, list[SourceFile]](list)
    for file in sorted(files, key=lambda file: file.name):
        if is_image_name(file.name):
            name = classes.get(file.name.rpartition(".")[0], "")
            if not _WNID.fullmatch(name):
                raise UserError(f"{table} has no class for '{shown(file.name)}' in {place}; fetch both again")
            by_class[name].append(file)
    others = [f"val/{shown(file.name)}" for file in files if not is_image_name(file.name)]
    listed = [_listed_class("val", name, images) for name, images in by_class.items()]
    return Source(listed, others, archives=[table, place])


def _table(place: Path) -> tuple[Path, Callable[[Path], dict[str, str]]] | None:
    """Return the table of classes that lies in or near ``place``, and what reads it."""
    for folder in (place, *place.absolute().parents[:5]):
        for name, read in ((DEVKIT, _devkit), (_SOLUTION, _solution)):
            if (table := folder / name).is_file():
                return table, read
    return None


def _solution(table: Path) -> dict[str, str]:
    """Read Kaggle's table: an ``ImageId``, and "wnid x y x y" for each box, all boxes of one class."""
    rows = csv.DictReader(read_text(table).splitlines())
    if rows.fieldnames != ["ImageId", "PredictionString"]:
        raise UserError(f"{table} has not the columns ImageId,PredictionString; fetch it again")
    return {row["ImageId"]: (row["PredictionString"] or "").partition(" ")[0] for row in rows}


def _devkit(archive: Path) -> dict[str, str]:
    """Read the classes of the validation images in the development kit, which numbers them in an order of its own."""
    wnids = Path(__file__).with_name("wnids.txt").read_text(encoding="ascii").split()
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(_TRUTH)
            truth = [int(line) for line in (file.read(_MOST) if file else b"").split()]
    except (tarfile.TarError, KeyError, EOFError, OSError, ValueError, zlib.error) as error:
        raise UserError(f"{archive} holds no {_TRUTH} that can be read ({error}); fetch it again") from None
    if strange := [number for number in truth if not 0 < number <= len(wnids)]:
        raise UserError(f"{archive}: {_TRUTH} has {strange[0]} for a label; fetch it again")
    return {f"ILSVRC2012_val_{number:08}": wnids[label - 1] for number, label in enumerate(truth, 1)}
