"""Recognise what a directory holds: ImageNet's tars, Kaggle's layout of it, or one folder per class."""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

from imagenet_fast.data.image_names import class_folders, look_into, shown
from imagenet_fast.data.imagefolder import deeper_images, require_images
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
    hidden = _hidden(root, "train")
    apart = _apart(root, "train", [of.name for of in classes])
    flat = _flat(root / "val")
    if not flat or {of.name for of in classes}.intersection(look_into(root / "val").folders):
        val = _classes(root, "val")
        apart += _apart(root, "val", [of.name for of in val])
        return Source("one folder a class", classes + val, apart=apart, hidden=hidden + _hidden(root, "val"))
    solution = next((f for f in (d / _SOLUTION for d in (root, *root.absolute().parents[:3])) if f.is_file()), None)
    if solution is None:
        raise UserError(
            f"{root / 'val'} does not say of which class its images are; put Kaggle's {_SOLUTION} beside it"
        )
    others = [f"val/{file.shown}" for file in flat if not file.is_image]
    apart += map(shown, deeper_images(root / "val", look_into(root / "val"), "val"))
    return Source("Kaggle's layout", classes + _solved(flat, solution), others, apart=apart, hidden=hidden)


def _classes(root: Path, split: str) -> list[SourceClass]:
    if not (root / split).is_dir():
        return []
    names = class_folders(root / split)
    for name in names:
        if not name.isprintable():
            raise UserError(f"{root / split} has a folder {name!r}, which is no name for a class; rename it")
    return [SourceClass(split, name, partial(_listed, root / split / name)) for name in names]


def _hidden(root: Path, split: str) -> list[str]:
    """Return the folders of a split whose names are not those of classes."""
    return [f"{split}/{shown(name)}" for name in look_into(root / split).hidden] if (root / split).is_dir() else []


def _apart(root: Path, split: str, classes: list[str]) -> list[str]:
    """Return images beside class folders and in subfolders of them. Raises UserError if a class has no others."""
    if not (root / split).is_dir():
        return []
    found = [f"{split}/{name}" for name in look_into(root / split).images]
    for name in classes:
        folder = root / split / name
        contents = look_into(folder)
        if deeper := deeper_images(folder, contents, f"{split}/{name}"):
            require_images(folder, contents)
            found += deeper
    return [shown(path) for path in found]


def _listed(folder: Path) -> list[SourceFile]:
    """Return the files in ``folder``, with links followed. Raises UserError for what is neither file nor folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                found.append(SourceFile(entry.name, entry.path, 0, entry.stat().st_size))
            elif not entry.is_dir():
                raise UserError(f"{entry.path} is neither a file nor a folder, or a link that leads nowhere; remove it")
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
