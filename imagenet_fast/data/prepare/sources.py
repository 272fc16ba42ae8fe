"""Recognise what a directory holds: ImageNet's tars, Kaggle's layout of it, or one folder per class."""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

from imagenet_fast.data.folders import class_folders, is_folder, list_folder, list_split, shown
from imagenet_fast.data.prepare.imagenet_archives import DEVKIT, TRAIN, VAL, flat_classes, official_source
from imagenet_fast.data.prepare.source_files import Source, SourceClass, SourceFile
from imagenet_fast.errors import UserError

_KAGGLE = Path("ILSVRC/Data/CLS-LOC")
_SOLUTION = "LOC_val_solution.csv"


def recognise(folder: Path) -> Source:
    """Return the source in ``folder``.

    Raises:
        UserError: The layout is not known, or the source is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}; give the one that holds ImageNet with --source DIR")
    if any((folder / name).is_file() for name in (TRAIN, VAL)):
        return official_source(folder)
    for root in (folder / _KAGGLE, folder / _KAGGLE.relative_to("ILSVRC"), folder):
        if any((root / split).is_dir() for split in ("train", "val")):
            return _folders(root)
    raise UserError(
        f"{folder} holds no ImageNet that is known: neither {TRAIN} or {VAL} (with {DEVKIT}), nor {_KAGGLE}/train as "
        "Kaggle has it, nor train/<class>/* and val/<class>/*; give the directory that does with --source DIR"
    )


def _folders(root: Path) -> Source:
    """Return the source with validation images in one folder per class, or all in one folder, as Kaggle has them."""
    classes = _classes(root, "train")
    apart, hidden = _around(root, "train", classes)
    flat = _flat(root / "val")
    if not flat or {of.name for of in classes}.intersection(list_folder(root / "val").folders):
        val = _classes(root, "val")
        apart_val, hidden_val = _around(root, "val", val)
        return Source("one folder a class", classes + val, apart=apart + apart_val, hidden=hidden + hidden_val)
    solution = next((f for f in (d / _SOLUTION for d in (root, *root.absolute().parents[:3])) if f.is_file()), None)
    if solution is None:
        raise UserError(
            f"{root / 'val'} does not say of which class its images are; put Kaggle's {_SOLUTION} beside it"
        )
    others = [f"val/{file.shown}" for file in flat if not file.is_image]
    apart += (f"val/{shown(path)}" for path in list_folder(root / "val").deeper())
    return Source("Kaggle's layout", classes + _solved(flat, solution), others, apart=apart, hidden=hidden)


def _classes(root: Path, split: str) -> list[SourceClass]:
    if not (root / split).is_dir():
        return []
    names = class_folders(root / split)
    for name in names:
        if not name.isprintable():
            raise UserError(f"{root / split} has a folder {name!r}, which is no name for a class; rename it")
    return [SourceClass(split, name, partial(_listed, root / split / name)) for name in names]


def _around(root: Path, split: str, classes: list[SourceClass]) -> tuple[list[str], list[str]]:
    """Return images that lie in no class's own folder, and folders that are no classes.

    Raises UserError if all images of a class lie deeper.
    """
    if not (root / split).is_dir():
        return [], []
    listed = list_split(root / split, [of.name for of in classes])
    for contents in listed.classes.values():
        if not contents.images and contents.deeper():
            contents.require_images()
    apart, hidden = ([f"{split}/{shown(path)}" for path in paths] for paths in (listed.apart, listed.hidden))
    return apart, hidden


def _listed(folder: Path) -> list[SourceFile]:
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


def _flat(folder: Path) -> list[SourceFile]:
    """Return the files in ``folder`` if there are images among them, else nothing."""
    files = _listed(folder) if folder.is_dir() else []
    return files if any(file.is_image for file in files) else []


def _solved(files: list[SourceFile], solution: Path) -> list[SourceClass]:
    """Group files by Kaggle's table: an ``ImageId``, and "wnid x y x y" for each box, all boxes of one class."""
    with solution.open(newline="", encoding="utf-8") as table:
        rows = csv.DictReader(table)
        if rows.fieldnames != ["ImageId", "PredictionString"]:
            raise UserError(f"{solution} has not the columns ImageId,PredictionString; fetch it again")
        wnid = {row["ImageId"]: (row["PredictionString"] or "").partition(" ")[0] for row in rows}
    images: dict[str, list[SourceFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.name):
        if not file.is_image:
            continue
        label = wnid.get(Path(file.name).stem, "")
        if not re.fullmatch(r"n\d{8}", label):
            raise UserError(f"{solution} has no class for {file.held_by}; fetch both again")
        images[label].append(file)
    return flat_classes(images)
