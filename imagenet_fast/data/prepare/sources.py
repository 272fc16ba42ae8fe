"""Recognise what a directory holds: for each split, archives, class folders, or images and a table of their classes."""

from __future__ import annotations

import csv
import os
import re
import tarfile
import zlib
from collections import defaultdict
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

from imagenet_fast.data.folders import FolderContents, class_folders, is_folder, is_image_name, list_folder, shown
from imagenet_fast.data.prepare.files import Source, SourceClass, SourceFile, members
from imagenet_fast.errors import UserError

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
_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_INNER = "images"  # Tiny-ImageNet's folder for the images of a class, and for those to validate on


def recognise(folder: Path) -> Source:
    """Return the source in ``folder``. Raises UserError if the layout is not known, or the source is damaged."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}; give the one that holds ImageNet with --source DIR")
    for root in (folder, folder / _KAGGLE, folder / _KAGGLE.relative_to("ILSVRC")):
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


def _split(root: Path, split: str, known: set[str]) -> Source | None:
    """Return one split, if it is there; ``known`` are the classes of training.

    The official tar goes before a folder with the split's name, and that before other tars named after the split.
    """
    folder = root / split
    if (official := root / {"train": TRAIN, "val": VAL}[split]).is_file():
        return _in_tars(root, split, [official])
    if not folder.is_dir():
        tars = [path for path in root.glob("*.tar") if split in re.split(r"[-_.]", path.stem)]
        return _in_tars(root, split, sorted(tars)) if tars else None
    tars = sorted(folder.glob("*.tar"))
    if not list_folder(folder).folders and tars:
        return _in_tars(root, split, tars)
    if packed := [tar for tar in tars if _CLASS_TAR.fullmatch(tar.name) and not tar.with_suffix("").is_dir()]:
        raise UserError(f"{packed[0]} is not unpacked, as others beside it are; unpack it, or remove their folders")
    return _in_folders(root, split, known)


# Archives.


def _in_tars(root: Path, split: str, tars: list[Path]) -> Source:
    """Return the split in tars, whose parts of a class are put together."""
    source = reduce(Source.__add__, (_in_tar(root, split, tar) for tar in tars))
    parts: dict[str, list[SourceClass]] = defaultdict(list)
    for of in source.classes:
        parts[of.name].append(of)
    classes = [of[0] if len(of) == 1 else _joined(of) for of in parts.values()]
    return replace(source, classes=classes)


def _joined(parts: list[SourceClass]) -> SourceClass:
    def files() -> list[SourceFile]:
        return [file for of in parts for file in of.listed()]

    return SourceClass(parts[0].split, parts[0].name, files, sum(of.measured() for of in parts))


def _in_tar(root: Path, split: str, tar: Path) -> Source:
    """Return what is in a tar: a class, class tars, class folders, or images to validate on without folders."""
    archives = [tar] if tar.name in MD5 else []
    if named := _CLASS_TAR.fullmatch(tar.name):
        return Source([SourceClass(split, named[1], partial(members, tar), tar.stat().st_size)])
    files = members(tar, flat=False)
    if any(file.name.endswith(".tar") for file in files):
        return Source([_class_tar(split, tar, file) for file in files], archives=archives)
    depths = {len(_folders(file)): file for file in files if is_image_name(file.name)}
    if len(depths) != 1 or (0 in depths and split == "train"):
        some = " and ".join(f"'{file.name}'" for file in depths.values()) or "none"
        raise UserError(f"{tar} must hold class tars, as n01440764.tar, or <class>/<image> each; it holds {some}")
    if 0 in depths:
        return _by_table(root, files, tar) + Source([], archives=archives)
    by_class: dict[str, list[SourceFile]] = defaultdict(list)
    others = []
    for file in files:
        if folders := _folders(file):
            by_class[folders[-1]].append(replace(file, name=file.name.rpartition("/")[2]))
        else:
            others.append(f"{split}/{shown(file.name)}")
    return Source(_listed_classes(split, by_class), others, archives=archives)


def _class_tar(split: str, tar: Path, file: SourceFile) -> SourceClass:
    named = _CLASS_TAR.fullmatch(file.name)
    if named is None:
        raise UserError(
            f"{tar} has a member '{file.name}', which is no class's; it must hold n01440764.tar and the like"
        )
    return SourceClass(split, named[1], partial(members, tar, file), file.size)


def _folders(file: SourceFile) -> list[str]:
    """Return the folders above a file in a tar, of which the last is its class."""
    folders = file.name.split("/")[:-1]
    return folders[:-1] if folders[-1:] == [_INNER] else folders


def _listed_classes(split: str, by_class: dict[str, list[SourceFile]]) -> list[SourceClass]:
    return [
        SourceClass(split, name, partial(list, files), sum(file.size for file in files))
        for name, files in by_class.items()
    ]


# Folders.


def _in_folders(root: Path, split: str, known: set[str]) -> Source:
    """Return the split in one folder a class, or in one with all images; ``known`` are the classes of training."""
    folder = root / split
    contents = list_folder(folder)
    classes = known.intersection(contents.folders) if known else {*contents.folders} - {_INNER}
    place = folder if contents.images or _INNER not in contents.folders else folder / _INNER
    if split == "val" and not classes and (inside := list_folder(place)).images:
        apart = _deeper(root, inside)
        return _by_table(root, _files(place), place) + Source([], apart=[*map(shown, apart)])
    apart = [f"{split}/{name}" for name in contents.images]
    source = Source([])
    for name in class_folders(folder):
        if not name.isprintable():
            raise UserError(f"{folder} has a folder {name!r}, which is no name for a class; rename it")
        place, inside = folder / name, list_folder(folder / name)
        if not inside.images and _INNER in inside.folders:
            place, inside = place / _INNER, list_folder(place / _INNER)
        source.classes.append(SourceClass(split, name, partial(_files_of_class, folder / name, place)))
        if deeper := _deeper(root, inside):
            inside.require_images()
            apart += deeper
    source.apart.extend(map(shown, apart))
    return source


def _deeper(root: Path, contents: FolderContents) -> list[str]:
    """Return the images in subfolders, as paths below ``root``."""
    return [os.path.join(os.path.relpath(contents.path, root), path) for path in contents.deeper()]  # noqa: PTH118


def _files_of_class(folder: Path, place: Path) -> list[SourceFile]:
    """Return the files of a class whose images lie in ``place``: its folder, or one inside it."""
    return _files(place) + (_files(folder) if place != folder else [])


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


def _by_table(root: Path, files: list[SourceFile], held_by: Path) -> Source:
    """Return the classes to validate on of images that lie together in ``held_by``."""
    for folder in (root / "val", root, *root.absolute().parents[:3]):
        for name, read in ((DEVKIT, _devkit), (_SOLUTION, _solution), (_ANNOTATIONS, _annotations)):
            if (table := folder / name).is_file():
                return _looked_up(files, held_by, table, read(table))
    raise UserError(
        f"{held_by} does not say of which class its images are; put {DEVKIT}, or Kaggle's {_SOLUTION}, beside it"
    )


def _looked_up(files: list[SourceFile], held_by: Path, table: Path, classes: dict[str, str]) -> Source:
    by_class: dict[str, list[SourceFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.name):
        if is_image_name(file.name):
            name = classes.get(file.name.rpartition(".")[0], "")
            if not re.fullmatch(r"n\d{8}", name):
                raise UserError(f"{table} has no class for '{shown(file.name)}' in {held_by}; fetch both again")
            by_class[name].append(file)
    others = [f"val/{shown(file.name)}" for file in files if not is_image_name(file.name)]
    archives = [table] if table.name in MD5 else []
    return Source(_listed_classes("val", by_class), others, archives=archives)


def _solution(table: Path) -> dict[str, str]:
    """Read Kaggle's table: an ``ImageId``, and "wnid x y x y" for each box, all boxes of one class."""
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != ["ImageId", "PredictionString"]:
            raise UserError(f"{table} has not the columns ImageId,PredictionString; fetch it again")
        return {row["ImageId"]: (row["PredictionString"] or "").partition(" ")[0] for row in rows}


def _annotations(table: Path) -> dict[str, str]:
    """Read Tiny-ImageNet's table: a file name, its wnid and a box."""
    rows = (line.split() for line in table.read_text(encoding="utf-8", errors="replace").splitlines())
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
