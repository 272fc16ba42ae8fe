"""Turn a source into folders or shards: in parallel, and resumable whenever it was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress, TaskID

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.data.prepare import output
from imagenet_fast.data.prepare.files import SPLITS, Source, SourceClass, SourceFile, parquet_to_tar
from imagenet_fast.data.prepare.sources import DEVKIT, MD5, in_unpacked, recognise
from imagenet_fast.data.prepare.write import Piece, Settings, check_classes, pieces_of, write_classes, write_piece
from imagenet_fast.data.source import in_sentences
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.errors import UserError, warn
from imagenet_fast.progress import progress_bars
from imagenet_fast.units import gigabytes

CLASSES = 1000
IMAGES = {"train": 1_281_167, "val": 50_000}
"""Number of images in each split. This and ``CLASSES`` are those of ImageNet's 2012 challenge."""

_BYTES_AROUND = 2100  # most that an image takes in a shard besides its own: two headers, the label, padding
_SPARE = 1.02  # a file's last block is half empty, and folders take space too
_SAMPLE_SPARE = 1.1
_PART = 4 << 20  # bytes to read at a time for an md5
_STAGING = ".preparing"
_SHOWN = 3  # paths of each kind

_Listed = Mapping[SourceClass, tuple[list[SourceFile], tuple[str, ...]]]
"""The images of each class, and the names of its other files."""


@dataclass(frozen=True)
class Prepared:
    """The result of ``prepare``."""

    record: output.Record
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
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--out {out} lies in --source {source}; give a directory beside it")
    with (
        output.alone_in(out), in_sentences(out), ThreadPoolExecutor(workers or usable_cores()) as pool,
        progress_bars("bytes") as bars,
    ):  # fmt: skip
        work = _Work(pool, bars, threading.Event())
        try:
            return _fill(found, source, out, settings, work, subset, md5 and not subset)
        except BaseException as error:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                print("stopped; run the same command again to continue", file=sys.stderr)
            raise


@dataclass(frozen=True)
class _Work:
    """Threads, the bars that show how far they are, and what ends them."""

    pool: Executor
    bars: Progress
    stop: threading.Event

    def advance(self, task: TaskID, read: int) -> None:
        """Advance a progress bar. Raises CancelledError if all work is to stop."""
        if self.stop.is_set():
            raise CancelledError
        self.bars.advance(task, read)


def _unpacked(found: Source, before: output.Record, out: Path, work: _Work) -> Source:
    """Return ``found`` with the tars that its parquet files become; those that are there already are not made again."""
    folder = out / _STAGING / "unpacked"
    tars: dict[Path, Path] = {}
    for number, (split, file) in enumerate(found.parquet):
        if split not in before.splits:
            at = file.stat()
            tars[folder / split / f"{number}-{at.st_size}-{at.st_mtime_ns}.tar"] = file
    for split in SPLITS:
        (folder / split).mkdir(parents=True, exist_ok=True)
    for stale in set(folder.glob("*/*")) - tars.keys():
        stale.unlink()
    missing = {tar: file for tar, file in tars.items() if not tar.exists()}
    size = sum(file.stat().st_size for file in missing.values())
    _require_room(out, size, " to be unpacked first")
    task = work.bars.add_task("unpacking", total=size)
    for _ in work.pool.map(lambda tar: parquet_to_tar(missing[tar], tar, partial(work.advance, task)), missing):
        pass
    return found + in_unpacked(list(tars))


def _fill(found: Source, source: Path, out: Path, settings: Settings, work: _Work, subset: bool, md5: bool) -> Prepared:
    """Make what ``out`` lacks, and move it to its place."""
    before, staging, is_folder = output.in_place(out, settings), out / _STAGING, settings.format == "folder"
    parquet: dict[str, dict[str, int]] = defaultdict(dict)
    for split, file in found.parquet:
        parquet[split][file.name] = file.stat().st_size
    if parquet.keys() - before.splits.keys():
        found = _unpacked(found, before, out, work)
    classes = _classes(found, before, source, subset)
    by_path = {of.path: of.size for of in classes}
    output.check_same(before, out, by_path, parquet, source)
    rest = [of for of in classes if of.split not in before.splits]
    if not rest and not staging.exists():
        return Prepared(before, already=True)
    output.begin(staging, output.Begun(settings=settings, classes=by_path), source)
    if rest and md5:
        _check_archives([path for path in found.archives if path.name in MD5], staging, work)
    by_split = {split: {*before.splits.get(split, {}), *_names_in(rest, split)} for split in SPLITS}
    names = sorted(by_split["train"] or by_split["val"])  # in the order of labels
    if not is_folder:
        check_classes(out, names)
    listed = _list(rest, work)
    if not subset:
        _check_counts(before, listed, source)
    pieces = pieces_of({of: images for of, (images, _) in listed.items()}, names, settings)
    missing = [piece for piece in pieces if not (staging / piece.split / piece.name).exists()]
    _check_space(out, missing, settings)
    _make(missing, staging, settings, work)
    splits, files = {**before.splits}, {**before.files}
    for of, (images, _) in listed.items():
        splits.setdefault(of.split, {})[of.name] = output.PreparedClass(images=len(images), size=of.size)
    for piece in [] if is_folder else pieces:
        files.setdefault(piece.split, {})[piece.name] = (staging / piece.split / piece.name).stat().st_size
    others = {f"{of.path}/{name}" for of, (_, names) in listed.items() for name in names}
    record = output.Record(
        settings=settings,
        splits={split: dict(sorted(splits[split].items())) for split in SPLITS if split in splits},
        files={split: files[split] for split in SPLITS if split in files},
        others=tuple(sorted({*before.others, *found.others, *others})),
        apart=tuple(sorted({*before.apart, *found.apart})),
        parquet=before.parquet | parquet,
    )
    if not is_folder:
        write_classes(out, names)
    output.publish(record, out, staging)
    return Prepared(record, already=False)


def _classes(found: Source, before: output.Record, source: Path, subset: bool) -> list[SourceClass]:
    """Return the classes of ``source`` to prepare: training first, by name.

    Raises UserError if there are not as many as there should be, or validation has one that training lacks.
    """
    names = {split: _names_in(found.classes, split) for split in SPLITS}
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
        raise UserError(
            f"{source} has a class {strangers[0]} to validate on that train lacks; name the classes of val as those of "
            f"train or, if images of many classes lie in {strangers[0]}, move them up, beside {DEVKIT}"
        )
    if strangers:
        warn(f"{len(strangers)} classes are left out of val, as train lacks them, the first {strangers[0]}")
    kept = [of for of in found.classes if of.split == "train" or of.name not in strangers]
    if not kept and not found.parquet:
        raise UserError(f"{source} has no classes in it; give the directory that holds ImageNet with --source DIR")
    return sorted(kept, key=lambda of: (SPLITS.index(of.split), of.name))


def _names_in(classes: Iterable[SourceClass], split: str) -> set[str]:
    return {of.name for of in classes if of.split == split}


def _list(rest: Sequence[SourceClass], work: _Work) -> _Listed:
    """List the classes. For tars this reads all headers."""
    task = work.bars.add_task("listing", total=sum(of.size for of in rest))

    def look(of: SourceClass) -> tuple[list[SourceFile], tuple[str, ...]]:
        found = of.sorted_out()
        work.advance(task, of.size)
        return found

    return dict(zip(rest, work.pool.map(look, rest), strict=True))


def _check_counts(before: output.Record, listed: _Listed, source: Path) -> None:
    for split, expected in IMAGES.items():
        found = sum(made.images for made in before.splits.get(split, {}).values())
        found += sum(len(images) for of, (images, _) in listed.items() if of.split == split)
        if found != expected:
            raise UserError(
                f"{source} has {found} images of {split}, and ImageNet has {expected}; fetch it again, or give "
                "--subset if that is meant"
            )


def _check_archives(archives: Sequence[Path], staging: Path, work: _Work) -> None:
    """Raise UserError if an archive is not image-net.org's, by its md5; those that passed before are not read again."""
    note = staging / "checked.json"
    stamps = json.dumps([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in archives])
    if note.exists() and note.read_text(encoding="utf-8") == stamps:
        return

    @in_sentences()
    def check(file: Path) -> None:
        task = work.bars.add_task(f"md5 of {file.name}", total=file.stat().st_size)
        digest = hashlib.md5(usedforsecurity=False)
        with file.open("rb", buffering=0) as stream:
            while part := stream.read(_PART):
                digest.update(part)
                work.advance(task, len(part))
        if digest.hexdigest() != MD5[file.name]:
            raise UserError(
                f"{file} is not what image-net.org gives: its md5 is {digest.hexdigest()}, not {MD5[file.name]}; fetch "
                "it again, or give --no-md5 if it is meant to be another"
            )

    for _ in work.pool.map(check, archives):
        pass
    atomic_write_text(note, stamps, fsync=True)


def _check_space(out: Path, pieces: Sequence[Piece], settings: Settings) -> None:
    """Raise UserError if the disk of ``out`` has no room for these pieces, by a sample of images that are decoded."""
    around = 0 if settings.format == "folder" else _BYTES_AROUND
    needed = _SPARE * sum(piece.size * piece.ratio + around * len(piece.images) for piece in pieces)
    told = ""
    if settings.decodes:
        needed *= _SAMPLE_SPARE
        told = f" at --resize {settings.resize}, by a sample of them" if settings.resize else " as pixels"
    _require_room(out, needed, told)


def _require_room(out: Path, needed: float, told: str) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            f"the images need {gigabytes(needed)}{told}, and the disk of {out} has {gigabytes(free)} free: "
            f"{gigabytes(needed - free)} are missing; free them, or give --out on another disk"
        )


def _make(pieces: Sequence[Piece], staging: Path, settings: Settings, work: _Work) -> None:
    """Make pieces in threads."""
    tasks = {
        split: work.bars.add_task(split, total=sum(piece.size for piece in pieces if piece.split == split))
        for split in dict.fromkeys(piece.split for piece in pieces)
    }

    def make(piece: Piece) -> None:
        path = staging / "partial" / piece.split / piece.name
        write_piece(piece, path, settings, partial(work.advance, tasks[piece.split]))

    pending = {work.pool.submit(make, piece): piece for piece in pieces}
    while pending:
        done = wait(pending, return_when=FIRST_COMPLETED).done
        os.sync()  # once for many files: to sync each would take longer than to write it
        for future in sorted(done, key=lambda future: future.exception() is not None):
            future.result()
            piece = pending.pop(future)
            (staging / "partial" / piece.split / piece.name).rename(staging / piece.split / piece.name)


def report(prepared: Prepared, out: Path) -> Iterator[str]:
    """Yield lines that tell the user what ``out`` holds and what was left out."""
    record = prepared.record
    yield f"{out} {'holds already' if prepared.already else 'now holds'}:"
    for split, classes in record.splits.items():
        count = sum(file.endswith(".tar") for file in record.files.get(split, ()))
        shards = f", {count} shards" if count else ""
        images = sum(made.images for made in classes.values())
        yield f"  {split:<5}  {images} images in {len(classes)} classes{shards}"
    apart = f"as they lie in no class's own folder and so belong to no class: {len(record.apart)} images,"
    left_out = {"as they are no images:": record.others, apart: record.apart}
    for why, paths in left_out.items():
        if paths:
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            yield f"left out, {why} {', '.join(paths[:_SHOWN])}{more}"
    if any(left_out.values()):
        yield f"all of their names are in {out / output.RECORD}"
