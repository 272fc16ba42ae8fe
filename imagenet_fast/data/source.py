"""Open the images of a data directory, in class folders or in WebDataset tars."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data import folders
from imagenet_fast.data.folders import is_class_name, shown
from imagenet_fast.data.paths import resolve_data_dir
from imagenet_fast.data.pixels import NO_MEMORY
from imagenet_fast.data.quarantine import QUARANTINE, prefix_of, quarantined
from imagenet_fast.data.shards import Shards, open_webdataset
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.data_config import Data, ImageData, SyntheticData

SplitName = Literal["train", "val"]
T = TypeVar("T")

WORDS: dict[SplitName, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "valid")}
"""The words that name a split, in the names of its files or as the name of their folder."""

_TAR = re.compile(r".*\.tar", re.DOTALL)
_RECORDS = re.compile(r".*(\d-of-\d+|\.tfrecords?)(\.(gz|bz2|xz|zst|lz4))?", re.DOTALL)
_COMPRESSED = re.compile(r".*\.tar\.(gz|bz2|xz|zst|lz4)|.*\.(tgz|tbz2?|txz|zip)", re.DOTALL)
_PART_OF = re.compile(r"(\d+)[-_. ]?of[-_. ]?(\d+)")
_PAUSES_S = (0.1, 1.0, 5.0)  # between tries to read an image
_OFFICIAL = re.compile(r"ILSVRC\d+_.*\.tar|n\d{8}\.tar")


class ImageSource(Protocol):
    """The images of a split, numbered from 0 in an order that never changes."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels, int64 [images]: indices into ``classes``."""

    @property
    def classes(self) -> list[str]:
        """Names of all classes of the training split."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def digest(self) -> str:
        """Return a digest of all names and labels in order; it does not depend on where the data lies."""

    def name(self, index: int) -> str:
        """Return how messages name image ``index``: by its path, or by its place in a shard."""

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image ``index``. Thread-safe. Raises ImageDecodeError if its shard is cut off."""

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Announce that these images will be read next, so that a file server can be asked for all of them."""


def patiently(images: ImageSource, index: int, load: Callable[[int], T], waits: bool = True) -> T:
    """Return ``load(index)``, tried again for some seconds while the image cannot be read, unless it never ``waits``.

    Raises:
        OSError: If it cannot be read.
        UserError: If memory is too short to load it.
    """
    pauses = iter(_PAUSES_S if waits else ())
    while True:
        try:
            return load(index)
        except Exception as error:
            if NO_MEMORY.search(repr(error)):
                raise UserError(
                    f"{images.name(index)} cannot be decoded, as there is too little memory; let each process have "
                    "more, or work on fewer images at a time (data.workers of a recipe, --workers of `data verify`)"
                ) from None
            if not isinstance(error, OSError) or (pause := next(pauses, None)) is None:
                raise
            time.sleep(pause)


@contextmanager
def in_sentences(written: Path | None = None) -> Iterator[None]:
    """Raise a UserError for every OSError; decorates functions. Only what was ``written`` can have failed, if given."""
    try:
        yield
    except OSError as error:
        if written is not None:
            raise UserError(
                f"{written} cannot be written to ({error.strerror}); put that right, and the same command goes on"
            ) from None
        what = shown(os.fsdecode(error.filename)) if error.filename else "the data"
        raise UserError(f"{what} cannot be read ({error.strerror}); put that right, and start again") from None


@in_sentences()
def check_folders(root: Path) -> None:
    """Raise UserError if ``root`` cannot be trained on, by the names of its class folders or shards alone."""
    train, val = find_shards(root, "train"), find_shards(root, "val")
    if bool(train) != bool(val):
        there, lacking = ("train", "val") if train else ("val", "train")
        raise UserError(f"{root} has shards of the {there} split but none of that kind of {lacking}; put both there")
    if not train:
        folders.both_splits(root)


@in_sentences()
def check_validation(root: Path) -> None:
    """Raise UserError if ``root`` cannot be evaluated on, by the names of its class folders or shards alone."""
    if not find_shards(root, "val"):
        folders.names_of(root, "val")
    elif find_shards(root, "train"):
        check_folders(root)


def open_training(root: Path) -> ImageSource:
    """Open the training split, without the images in quarantine. Raises UserError if it is damaged."""
    return _open(root, "train")


def open_validation(root: Path) -> ImageSource:
    """Open the validation split, without the images in quarantine. Raises UserError if it is damaged.

    Its labels number the classes of the training split if there is one.
    """
    return _open(root, "val")


@in_sentences()
def _open(root: Path, split: SplitName) -> ImageSource:
    shards = find_shards(root, split)
    whole = open_shards(root, split, shards) if shards else folders.scan_split(root, split)
    prefix = prefix_of(root)
    kept = whole.without({prefix + path for path in quarantined(root)})
    if emptied := set(whole.labels.tolist()) - set(kept.labels.tolist()):
        raise UserError(
            f"{root / split / whole.classes[min(emptied)]}: all images are in {root / QUARANTINE}; bring sound ones, "
            "or remove the class"
        )
    return kept


def open_shards(root: Path, split: SplitName, shards: Sequence[Path]) -> Shards:
    """Open all images of a split in the ``shards`` that ``find_shards`` has found, those in quarantine too.

    Raises UserError if a shard is damaged.
    """
    return open_webdataset(root, split, shards, shards if split == "train" else find_shards(root, "train"))


@in_sentences()
def find_shards(root: Path, split: SplitName) -> list[Path]:
    """Return the shards of a split; there are none if its images lie in class folders.

    Raises:
        UserError: If there are both, a shard is missing, or the files are TFRecords or ImageNet's own archives.
    """
    paths, nested = files_of(root, split, [root / word for word in WORDS[split]])
    tars = [path for path in paths if _TAR.fullmatch(path.name) and not _OFFICIAL.fullmatch(path.name)]
    if nested and tars:
        raise UserError(
            f"{root} holds the {split} split in several formats ({tars[0]} and folders in {split}); keep one of them"
        )
    if nested:
        return []
    refuse_packed(paths)
    check_parts(tars, split)
    if tars:
        _require_prepared(root, split, tars)
    elif official := [path for path in paths if _OFFICIAL.fullmatch(path.name)]:
        raise UserError(
            f"{official[0]} is one of ImageNet's own archives; make what can be trained on out of them: "
            "`imagenet-fast data prepare`"
        )
    return tars


def files_of(root: Path, split: SplitName, folders: Sequence[Path]) -> tuple[list[Path], bool]:
    """Return the files of a split, sorted, and whether there are class folders in its ``folders``.

    They are files in ``root`` whose names contain a word for the split, and, if there are no class folders, those in
    its folders.
    """
    inside = [entry for folder in folders for entry in entries_of(folder)]
    nested = any(is_class_name(entry.name) and entry.is_dir() for entry in inside)
    named = [entry for entry in entries_of(root) if said(split, entry.name)]
    return sorted(Path(entry.path) for entry in named + inside * (not nested) if entry.is_file()), nested


def said(split: SplitName, name: str) -> set[str]:
    """Return the words for the split that a file's name contains."""
    return {word for word in WORDS[split] if re.search(rf"(?<![^-_.]){word}(?![^-_.])", name)}


def entries_of(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of ``folder`` that are not hidden; none if it does not exist."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))


def refuse_packed(paths: Sequence[Path]) -> None:
    """Raise UserError if a file of a split is a TFRecord, or is compressed and does not lie unpacked beside."""
    for path in paths:
        if _RECORDS.fullmatch(path.name):
            raise UserError(
                f"{path} is a TFRecord by its name, and these are not read; write its images as WebDataset tars "
                "(KEY.jpg and KEY.cls) or into class folders, and move it away"
            )
        if _COMPRESSED.fullmatch(path.name) and path.with_suffix("") not in paths:
            raise UserError(f"{path} is compressed, so that no image in it can be read on its own; unpack it")


def check_parts(paths: Sequence[Path], split: SplitName) -> None:
    """Raise UserError if files of a split are not all of its parts and no others, by their names.

    They are if no number is missing: in between, or up to the total in their names.
    """
    for path in paths:
        if any(said(other, path.name) for other in get_args(SplitName) if other != split):
            raise UserError(
                f"{path} would be taken for {split}, and is named after the other split; name it, and the folder it is "
                "in, after the split of its images"
            )
    if twice := [name for name, times in Counter(path.name for path in paths).items() if times > 1]:
        places = " and ".join(str(path.parent) for path in paths if path.name == twice[0])
        raise UserError(f"{places} both hold {twice[0]}, whose images would count twice; keep one of them")
    if len(words := {word for path in paths for word in said(split, path.name)}) > 1:
        raise UserError(f"{paths[0].parent} holds parts of {' and of '.join(sorted(words))}; keep one set")
    alike: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        of = _PART_OF.search(path.name)
        alike[path.name[: of.start()] if of else re.sub(r"\d+", "0", path.name)].append(path)
    for parts in alike.values():
        folder, example = parts[0].parent, parts[0].name
        if numbered := [(int(of[1]), int(of[2])) for part in parts if (of := _PART_OF.search(part.name))]:
            there, total = {number for number, _ in numbered}, max(total for _, total in numbered)
            expected = range(total) if 0 in there else range(1, total + 1)
        else:
            columns = zip(*(map(int, re.findall(r"\d+", part.name)) for part in parts), strict=True)
            counting = [{*column} for column in columns if len({*column}) > 1]
            there = counting[0] if len(counting) == 1 else {0}
            expected = range(min(there), max(there) + 1)
        found = sum(number in expected for number in there)
        if numbered and (len(parts) > found or len({of for _, of in numbered}) > 1):
            raise UserError(f"{folder} holds several sets of parts like {example}; keep one of them")
        if found < len(expected):
            first = next(number for number in expected if number not in there)
            raise UserError(
                f"{folder} lacks {len(expected) - found} of the {len(expected)} parts like {example}, number {first} "
                "first; put them there"
            )


def _require_prepared(root: Path, split: SplitName, tars: list[Path]) -> None:
    """Raise UserError if a tar is missing that `data prepare` has put there: gaps at either end show nowhere else."""
    try:
        noted = json.loads((root / "prepared.json").read_bytes())["files"][split]
        there = {path.name for path in tars if path.parent == root / split}
        lost = sorted(name for name in noted if str(name).endswith(".tar") and name not in there)
    except (OSError, ValueError, KeyError, TypeError):  # not from `data prepare`, or not as shards
        return
    if lost and any(path.name in noted for path in tars):
        raise UserError(
            f"{root / split} lacks {len(lost)} of the shards that {root / 'prepared.json'} lists, such as {lost[0]}; "
            "copy them too, or remove that file to train on a part"
        )


def find_data(data: Data, given: Path | None, check: Callable[[Path], None] = check_folders) -> Path | None:
    """Return the directory of the images after a ``check``, or None for synthetic images.

    It is the one that the user has ``given``, else the data set's own. Raises UserError if there are no such images, or
    synthetic ones and ``given``.
    """
    if not isinstance(data, SyntheticData):
        root = resolve_data_dir(data.dataset, given).absolute()
        check(root)
        _check_size(root, data, trains=check is not check_validation)
        return root
    if given is not None:
        raise UserError(
            f"--data {given} would not be read: data.loader is 'synthetic', which makes its own images; "
            "leave --data out, or choose a recipe with another loader"
        )
    return None


def _check_size(root: Path, data: ImageData, trains: bool) -> None:
    """Raise UserError if `data prepare` has shrunk the images so far that loaders would enlarge even whole ones."""
    largest = max(data.training_sizes) if trains else 0
    whole = data.crop != "resized" or not data.augment  # images are resized before they are cropped
    needed = max(data.resize, data.resize * largest // data.image_size if whole else largest)
    try:
        side = json.loads((root / "prepared.json").read_bytes())["settings"]["resize"]
    except (OSError, ValueError, KeyError, TypeError):  # not from `data prepare`
        return
    if isinstance(side, int) and side < needed:
        raise UserError(
            f"{root} holds images that `data prepare` has shrunk to {side} pixels, and the recipe enlarges them to "
            f"{needed}; prepare them with --resize {needed} or more, or choose a smaller data.resize or data.sizes"
        )
