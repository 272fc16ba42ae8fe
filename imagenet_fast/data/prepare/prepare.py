"""Turn a source into folders or shards: in parallel, and resumable whenever it was stopped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from imagenet_fast.data.format_detection import open_training, open_validation
from imagenet_fast.data.formats.shard_writer import check_classes, write_classes
from imagenet_fast.data.image_names import look_into
from imagenet_fast.data.prepare.output_layout import (
    BYTES_AROUND,
    classes_made,
    folder_pieces,
    in_shards,
    sample_of,
    sample_of_classes,
    shard_pieces,
)
from imagenet_fast.data.prepare.preflight import check_archives, check_space
from imagenet_fast.data.prepare.source_files import Source, SourceClass
from imagenet_fast.data.prepare.sources import recognise
from imagenet_fast.data.prepare.staging_dir import RECORD, SPLITS, Record, Settings, Splits, StagingDir, alone_in
from imagenet_fast.data.prepare.worker_pool import WorkerPool
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.errors import UserError, warn

CLASSES = 1000
IMAGES = {"train": 1_281_167, "val": 50_000}
"""Number of images in each split. This and ``CLASSES`` are those of ImageNet's 2012 challenge."""

_T = TypeVar("_T")
_Sized = Mapping[SourceClass, int]
"""Classes, with the bytes that their files take in the source."""


@dataclass(frozen=True)
class Prepared:
    """The result of ``prepare``."""

    record: Record
    source: str
    """The layout that the source was recognised as."""
    already: bool
    """True if there was nothing to do."""


def prepare(
    source: Path, out: Path, settings: Settings, *, subset: bool = False, md5: bool = True, workers: int | None = None
) -> Prepared:
    """Fill ``out`` from ``source``, and return what it then holds.

    No split is moved to its place before everything is made. If the call fails or is interrupted by KeyboardInterrupt,
    what has been made is kept, and the next call resumes from there.

    Args:
        source: The directory that holds ImageNet.
        out: The directory to fill.
        settings: The format of the result, and how images are shrunk.
        subset: Whether fewer classes or images than ImageNet has are accepted, and archives other than its own.
        md5: Whether the archives must have the md5 of ImageNet's own.
        workers: Number of classes or shards to make at a time; None for one per core.

    Raises:
        UserError: Something is wrong with the source, with ``out``, or with what is there already.
    """
    found = recognise(source)
    _check_outside(source, out)

    def counted(splits: Splits) -> None:
        if not subset:
            _check_counts(splits, source)

    stop = threading.Event()
    with alone_in(out), ThreadPoolExecutor(workers or usable_cores()) as pool:
        try:
            staging = StagingDir(out)
            before = staging.open(settings)
            classes = _classes(found, before, source, subset)
            with Console(stderr=True).status("listing"):
                sized = dict(zip(classes, pool.map(SourceClass.measured, classes), strict=True))
            _check_same(before, staging, sized, source)
            rest = {of: size for of, size in sized.items() if of.split not in before.splits}
            if not rest and not staging.folder.exists():
                return Prepared(before, found.told, already=True)
            staging.begin(settings)
            with progress_bars("bytes") as bars:
                if rest and md5 and not subset:
                    check_archives(found.md5, staging.folder, pool, bars, stop)
                fill = _fill_folders if settings.format == "folder" else _fill_shards
                record = fill(rest, before, WorkerPool(staging, source, pool, bars, stop), counted)
                kinds = ("others", "apart", "hidden")
                left_out = {kind: {*getattr(before, kind), *getattr(found, kind)} for kind in kinds}
                record = record.model_copy(update={kind: tuple(sorted(paths)) for kind, paths in left_out.items()})
            staging.publish(record)
            if record.files:
                _look_through(out, record)
            staging.close()
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                print("stopped; run the same command again to continue", file=sys.stderr)
            raise
    return Prepared(record, found.told, already=False)


def _check_outside(source: Path, out: Path) -> None:
    """Raise UserError if the result would be part of the source."""
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--out {out} lies in --source {source}; give a directory beside it")


def _fill_folders(rest: _Sized, before: Record, workers: WorkerPool, counted: Callable[[Splits], None]) -> Record:
    """Make the classes ``rest``, of splits that are not in their places, and return the new record."""
    pieces = folder_pieces(rest, before.settings)
    kept = workers.kept(pieces)
    missing = [piece for piece in pieces if piece not in kept]
    size = sum(piece.size for piece in missing)
    check_space(workers.staging.out, size, len(missing), before.settings, lambda: sample_of_classes(list(rest)))
    made: Splits = {}
    for piece, what in workers.make(pieces, kept).items():
        made.setdefault(piece.split, {})[piece.name] = what
    splits = _in_order({**before.splits, **made})
    counted(splits)
    return before.model_copy(update={"splits": splits})


def _fill_shards(rest: _Sized, before: Record, workers: WorkerPool, counted: Callable[[Splits], None]) -> Record:
    """Make the shards of the classes ``rest``, and return the new record.

    Which image goes into which shard is decided, and all images are counted, before the first shard is written.
    """
    out, settings = workers.staging.out, before.settings
    names = _names(rest, before)
    check_classes(out, names)
    listed = workers.list(rest)
    counted({**before.splits, **classes_made(listed, rest, {})})
    placed = {split: in_shards(split, listed, names) for split in SPLITS}
    pieces = shard_pieces(placed, names, settings)
    kept = workers.kept(pieces)
    missing = [piece for piece in pieces if piece not in kept]
    around = BYTES_AROUND * sum(map(len, placed.values())) * len(missing) // max(1, len(pieces))
    size = sum(piece.size for piece in missing) + around
    check_space(out, size, len(missing), settings, lambda: chain.from_iterable(map(sample_of, placed.values())))
    made = workers.make(pieces, kept)
    write_classes(out, names)
    return before.model_copy(
        update={
            "splits": _in_order({**before.splits, **classes_made(listed, rest, made)}),
            "files": _in_order({**before.files, **workers.staging.sizes(pieces)}),
        }
    )


def _names(rest: _Sized, before: Record) -> list[str]:
    """Return the sorted class names that number the labels: those of the training split, if there are any."""
    for split in SPLITS:
        if names := before.splits.get(split, {}).keys() | {of.name for of in rest if of.split == split}:
            return sorted(names)
    return []


def _in_order(splits: dict[str, dict[str, _T]]) -> dict[str, dict[str, _T]]:
    return {split: dict(sorted(splits[split].items())) for split in SPLITS if split in splits}


def _look_through(out: Path, record: Record) -> None:
    """Open the splits as the first run would, so that no run has to wait for the index and errors show now."""
    if "train" in record.splits:
        open_training(out)
    if "val" in record.splits:
        open_validation(out)


def _classes(found: Source, before: Record, source: Path, subset: bool) -> list[SourceClass]:
    """Return the classes of ``source`` to prepare: training first, by name.

    Raises UserError if there are not as many as there should be, or validation has one that training lacks.
    """
    names = {split: {of.name for of in found.classes if of.split == split} for split in SPLITS}
    if not subset:
        for split, given in names.items():
            there = given | before.splits.get(split, {}).keys()
            if len(there) != CLASSES:
                raise UserError(
                    f"{source} has {len(there)} classes of {split}, and ImageNet has {CLASSES}; give all of it, or "
                    "--subset if a part is meant"
                )
    train = names["train"] | before.splits.get("train", {}).keys()
    strangers = sorted(names["val"] - train) if train else []
    if strangers and (not subset or len(strangers) == len(names["val"])):
        raise UserError(f"{source} has a class {strangers[0]} to validate on that train lacks; fetch both again")
    if strangers:
        warn(f"{len(strangers)} classes are left out of val, as train lacks them, the first {strangers[0]}")
    kept = [of for of in found.classes if of.split == "train" or of.name not in strangers]
    if not kept:
        raise UserError(f"{source} has no classes in it; give the directory that holds ImageNet with --source DIR")
    return sorted(kept, key=lambda of: (SPLITS.index(of.split), of.name))


def _check_same(before: Record, staging: StagingDir, sized: _Sized, source: Path) -> None:
    """Raise UserError if ``out`` was made from another source, or has been changed since."""
    now = {split: {of.name: size for of, size in sized.items() if of.split == split} for split in SPLITS}
    for split, classes in before.splits.items():
        if not now[split]:  # the source has only the other split
            continue
        strangers = {name for name, made in classes.items() if now[split].get(name) != made.size}
        strangers |= now[split].keys() - classes.keys()
        if strangers:
            raise UserError(
                f"{staging.out} was made from another source than {source}, by {split}/{min(strangers)}; give that "
                "one, or another --out"
            )
    if before.settings.format == "folder":
        _check_folders(before, staging)
    else:
        _check_files(before, staging)


def _check_folders(before: Record, staging: StagingDir) -> None:
    for split, classes in before.splits.items():
        for name, made in classes.items():
            folder = staging.out / split / name
            if not folder.is_dir() or len(look_into(folder).images) != made.images:
                raise UserError(
                    f"{folder} has not the {made.images} images any more that were put there; remove "
                    f"{folder.parent}, and it is made again"
                )


def _check_files(before: Record, staging: StagingDir) -> None:
    for split, files in before.files.items():
        for name, size in files.items():
            path = staging.out / split / name
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(
                    f"{path} has not the {size} bytes any more that were put there; remove {path.parent}, and it is "
                    "made again"
                )


def _check_counts(splits: Splits, source: Path) -> None:
    for split, expected in IMAGES.items():
        found = sum(made.images for made in splits[split].values())
        if found != expected:
            raise UserError(
                f"{source} has {found} images of {split}, and ImageNet has {expected}; fetch it again, or give "
                "--subset if that is meant: what has been made is kept"
            )


def report(prepared: Prepared, out: Path) -> Iterator[str]:
    """Yield lines that tell the user what ``out`` holds and what was left out."""
    record = prepared.record
    yield f"{out} {'holds already' if prepared.already else 'now holds'}, from {prepared.source}:"
    for split, classes in record.splits.items():
        count = sum(file.endswith(".tar") for file in record.files.get(split, ()))
        shards = f", {count} shards" if count else ""
        images = sum(made.images for made in classes.values())
        yield f"  {split:<5}  {images} images in {len(classes)} classes{shards}"
    every = [(f"{split}/{name}", made) for split, classes in record.splits.items() for name, made in classes.items()]
    left_out = [*record.others] + [f"{path}/{file}" for path, made in every for file in made.left_out]
    undecodable = [f"{path}/{file}" for path, made in every for file in made.undecodable]
    if left_out:
        yield f"left out, as they are no images: {_first(left_out)}"
    if record.apart:
        yield (
            "left out, as they lie in no class's own folder and so belong to no class: "
            f"{len(record.apart)} images, {_first(record.apart)}"
        )
    if record.hidden:
        yield f"left out, as hidden folders and those of systems are no classes: {_first(record.hidden)}"
    if undecodable:
        yield f"copied as they are, as they cannot be decoded: {_first(undecodable)}"
    if left_out or undecodable or record.apart or record.hidden:
        yield f"all of their names are in {out / RECORD}"


def _first(paths: Sequence[str]) -> str:
    most = 3
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
