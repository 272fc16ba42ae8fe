"""Recognise what a directory holds: for each split, archives, class folders, or images and a table of their classes."""

from __future__ import annotations

import csv
import os
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

from imagenet_fast.data.folders import (
    FolderContents,
    class_folders,
    is_class_name,
    is_folder,
    is_image_name,
    list_folder,
    shown,
)
from imagenet_fast.data.index import map_in_order
from imagenet_fast.data.prepare.files import Source, SourceClass, SourceFile, members
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
_ANNOTATIONS = "val_annotations.txt"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_MOST = 1 << 20  # bytes of it; it has some 200 kB
_OFFICIAL = {"train": TRAIN, "val": VAL}
_WNID = re.compile(r"n\d{8}")
_CLASS_TAR = re.compile(rf"({_WNID.pattern})\.tar")
_INNER = "images"  # Tiny-ImageNet's folder for the images of a class, and for those to validate on


@in_sentences()
def recognise(folder: Path) -> Source:
    """Return the source in ``folder``. Raises UserError if the layout is not known, or the source is damaged."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}; give the one that holds ImageNet with --source DIR")
    for root in (folder, folder / "data", folder / _KAGGLE, folder / _KAGGLE.relative_to("ILSVRC")):
        train = _split(root, "train", set())
        val = _split(root, "val", {of.name for of in train.classes} if train else set())
        if train and val:
            return train + val
        if found := train or val:
            return found
    raise UserError(
        f"{folder} holds no ImageNet that is known: neither {TRAIN} or {VAL} (with {DEVKIT}), nor {_KAGGLE}/train as "
        "Kaggle has it, nor train/<class>/* and val/<class>/*, nor train.tar and val.tar with such folders, nor "
        "train/n01440764.tar and the like, nor data/train-*.parquet; give the directory that does with --source DIR"
    )


def _split(root: Path, split: SplitName, known: set[str]) -> Source | None:
    """Return one split, if it is there; ``known`` are the classes of training.

    The official tar goes before folders with the split's name, and these before files named after the split.
    """
    if (official := root / _OFFICIAL[split]).is_file():
        return in_tars(split, [official])
    folders = [_unwrapped(root / word, split) for word in WORDS[split] if (root / word).is_dir()]
    for folder in folders:
        contents = list_folder(folder)
        if contents.folders or contents.images:
            return _in_folders(root, split, folder, known)
    paths, _ = files_of(root, split, folders)
    refuse_packed(paths)
    tars = [path for path in paths if path.suffix == ".tar"]
    parquet = [path for path in paths if path.suffix == ".parquet"]
    if tars and parquet:
        raise UserError(f"{root} holds the {split} split in several formats ({tars[0]} and {parquet[0]}); keep one")
    check_parts(parquet + [tar for tar in tars if not _CLASS_TAR.fullmatch(tar.name)], split)
    if parquet:
        return Source([], taken=parquet, parquet=[(split, path) for path in parquet])
    return in_tars(split, tars) if tars else None


def _unwrapped(folder: Path, split: SplitName) -> Path:
    """Return the folder that holds a split: ``folder``, or a folder that is alone in it and no class."""
    contents = list_folder(folder)
    while not contents.images and len(contents.folders) == 1 and _is_wrapper(contents.folders[0], split, folder):
        folder /= contents.folders[0]
        contents = list_folder(folder)
    return folder


def _is_wrapper(name: str, split: SplitName, place: Path) -> bool:
    """Return whether the only folder in ``place`` has a name that is no class's: images to validate on lie in it."""
    if name in (*WORDS[split], _INNER, Path(_OFFICIAL[split]).stem):
        return True
    return split == "val" and not _WNID.fullmatch(name) and _table(place) is not None


# Archives.


def in_tars(split: SplitName, tars: list[Path]) -> Source:
    """Return the split in tars, in which a class may lie in parts: in tars whose names differ in numbers alone.

    Raises UserError if a tar cannot be read, or other tars have a class of one name.
    """
    found = {tar: _in_tar(split, tar) for tar in tars}
    parts: dict[str, list[SourceClass]] = defaultdict(list)
    first: dict[str, Path] = {}
    for tar, source in found.items():
        for of in source.classes:
            other = first.setdefault(of.name, tar)
            if re.split(r"\d+", other.name) != re.split(r"\d+", tar.name):
                raise UserError(
                    f"{other} and {tar} both hold a class {of.name}; name folders after their classes or, if it is "
                    "one class in parts, number the tars: train-0.tar, train-1.tar"
                )
            parts[of.name].append(of)
    classes = [SourceClass(split, name, partial(_all_of, of), sum(o.size for o in of)) for name, of in parts.items()]
    whole = reduce(Source.__add__, found.values())
    return replace(whole, classes=classes, taken=whole.taken + tars)


def _all_of(parts: list[SourceClass]) -> list[SourceFile]:
    return [file for of in parts for file in of.listed()]


def _in_tar(split: SplitName, tar: Path) -> Source:
    """Return what is in a tar: a class, class tars, class folders, or images to validate on without folders."""
    if named := _CLASS_TAR.fullmatch(tar.name):
        return Source([SourceClass(split, named[1], partial(members, tar), tar.stat().st_size)])
    files = members(tar, flat=False)
    if any(file.name.endswith(".tar") and not file.name.startswith("._") for file in files):
        return Source([_class_tar(split, tar, file) for file in files if not file.name.startswith("._")])
    by_folder: dict[tuple[str, ...], list[SourceFile]] = defaultdict(list)
    for file in files:
        by_folder[_folders(file)].append(replace(file, name=file.name.rpartition("/")[2]))
    images = {
        folders: next(file.name for file in inside if is_image_name(file.name))
        for folders, inside in by_folder.items()
        if all(map(is_class_name, folders)) and any(is_image_name(file.name) for file in inside)
    }
    if split == "val" and len(images) == 1:
        (only,) = images
        if not only or _is_wrapper(only[-1], split, tar):
            return _by_table(by_folder.pop(only), tar) + Source([], _paths(split, by_folder))
    above = {folders[:-1] if folders else None: "/".join((*folders, name)) for folders, name in images.items()}
    (root, *others) = above or [None]
    above_split = root[:-1] if root and root[-1] in WORDS[split] else root or ()
    if root is None or others or any(word in above_split for words in WORDS.values() for word in words):
        some = " and ".join(f"'{shown(name)}'" for name in [*above.values()][:2]) or "none"
        raise UserError(
            f"{tar} must hold class tars, as n01440764.tar, or <class>/<image> each, of {split} alone; it holds {some}"
        )
    classes = [folders for folders in by_folder if folders and folders[:-1] == root and is_class_name(folders[-1])]
    by_class = {folders[-1]: by_folder.pop(folders) for folders in classes}
    return Source(_listed_classes(split, by_class), _paths(split, by_folder))


def _class_tar(split: SplitName, tar: Path, file: SourceFile) -> SourceClass:
    named = _CLASS_TAR.fullmatch(file.name)
    if named is None:
        raise UserError(
            f"{tar} has a member '{file.name}', which is no class's; it must hold n01440764.tar and the like"
        )
    return SourceClass(split, named[1], partial(members, tar, file), file.size)


def _folders(file: SourceFile) -> tuple[str, ...]:
    """Return the folders above a file in a tar, of which the last is its class."""
    folders = tuple(file.name.split("/")[:-1])
    return folders[:-1] if folders[-1:] == (_INNER,) else folders


def _paths(split: SplitName, left: Mapping[tuple[str, ...], list[SourceFile]]) -> list[str]:
    """Return the files that are left over in a tar."""
    return [shown("/".join((split, *folders, file.name))) for folders, files in left.items() for file in files]


def _listed_classes(split: str, by_class: dict[str, list[SourceFile]]) -> list[SourceClass]:
    return [
        SourceClass(split, name, partial(list, files), sum(file.size for file in files))
        for name, files in by_class.items()
    ]


# Folders.


def _in_folders(root: Path, split: SplitName, folder: Path, known: set[str]) -> Source:
    """Return the split in one folder a class, or in one with all images; ``known`` are the classes of training."""
    contents = list_folder(folder)
    classes = known.intersection(contents.folders) if known else contents.folders
    if split == "val" and contents.images and not classes:
        apart = [*map(shown, _deeper(root, contents))]
        return _by_table(_files(folder), folder) + Source([], apart=apart, taken=[folder])
    names = class_folders(folder)
    if packed := [name for name in contents.others if _CLASS_TAR.fullmatch(name) and name[:-4] not in names]:
        raise UserError(f"{folder / packed[0]} is not unpacked, as others beside it are; unpack it, or remove theirs")
    others = [f"{split}/{shown(name)}" for name in contents.others if not name.startswith(".")]
    source = Source([], others, [f"{split}/{shown(name)}" for name in contents.images], [folder])

    def look(name: str) -> tuple[list[SourceFile], list[str]]:
        inside, files = list_folder(folder / name), _files(folder / name)
        if not inside.images and _INNER in inside.folders:
            inside, files = list_folder(folder / name / _INNER), _files(folder / name / _INNER) + files
        if deeper := _deeper(root, inside):
            inside.require_images()
        return files, deeper

    for name, (files, deeper) in zip(names, map_in_order(look, names), strict=True):
        if not name.isprintable():
            raise UserError(f"{folder} has a folder {name!r}, which is no name for a class; rename it")
        source.classes.extend(_listed_classes(split, {name: files}))
        source.apart.extend(map(shown, deeper))
    return source


def _deeper(root: Path, contents: FolderContents) -> list[str]:
    """Return the images in subfolders, as paths below ``root``."""
    return [os.path.join(os.path.relpath(contents.path, root), path) for path in contents.deeper()]  # noqa: PTH118


def _files(folder: Path) -> list[SourceFile]:
    """Return the files in ``folder``, with links followed. Raises UserError for what is neither file nor folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_folder(entry):
                continue
            try:
                size = entry.stat().st_size if entry.is_file() else None
            except OSError:  # a loop of links
                size = None
            if size is None:
                raise UserError(f"{entry.path} is neither a file nor a folder, or a link that leads nowhere; remove it")
            found.append(SourceFile(entry.name, entry.path, 0, size))
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
    return Source(_listed_classes("val", by_class), others, taken=[table])


def _table(place: Path) -> tuple[Path, Callable[[Path], dict[str, str]]] | None:
    """Return the table of classes that lies in or near ``place``, and what reads it."""
    for folder in (place, *place.absolute().parents[:5]):
        for name, read in ((DEVKIT, _devkit), (_SOLUTION, _solution), (_ANNOTATIONS, _annotations)):
            if (table := folder / name).is_file():
                return table, read
    return None


def _solution(table: Path) -> dict[str, str]:
    """Read Kaggle's table: an ``ImageId``, and "wnid x y x y" for each box, all boxes of one class."""
    rows = csv.DictReader(read_text(table).splitlines())
    if rows.fieldnames != ["ImageId", "PredictionString"]:
        raise UserError(f"{table} has not the columns ImageId,PredictionString; fetch it again")
    return {row["ImageId"]: (row["PredictionString"] or "").partition(" ")[0] for row in rows}


def _annotations(table: Path) -> dict[str, str]:
    """Read Tiny-ImageNet's table: a file name, its wnid and a box."""
    rows = (line.split() for line in read_text(table).splitlines())
    return {row[0].rpartition(".")[0]: row[1] for row in rows if len(row) > 1}


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
