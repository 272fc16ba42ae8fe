"""A source made into ``train/<class>/*`` and ``val/<class>/*``: in parallel, and resumable whenever it was stopped."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from imagenet_fast.data.preparing.bars import new_bars
from imagenet_fast.data.preparing.checksums import check_archives
from imagenet_fast.data.preparing.located import PictureClass, Source
from imagenet_fast.data.preparing.shrinking import Undecodable, shrunk
from imagenet_fast.data.preparing.sources import recognise
from imagenet_fast.data.preparing.space import check_space
from imagenet_fast.data.preparing.workshop import RECORD, SPLITS, Made, Record, Settings, Workshop, alone_in
from imagenet_fast.errors import UserError, warn
from imagenet_fast.ranks.cores import usable_cores

CLASSES = 1000
PICTURES = {"train": 1_281_167, "val": 50_000}
"""Of ImageNet's challenge of 2012."""

_Sized = Mapping[PictureClass, int]
"""Classes, and the bytes that their files take in the source."""


@dataclass(frozen=True)
class Prepared:
    record: Record
    source: str
    """What it was taken for."""
    already: bool
    """There was nothing to do."""


def prepare(
    source: Path, out: Path, settings: Settings, *, subset: bool = False, md5: bool = True, workers: int | None = None
) -> Prepared:
    """Fill ``out`` from ``source``, ``workers`` classes at a time (by default one a core), and say what it holds then.

    No split is in its place before all of it is made. ``subset``: fewer classes or pictures than ImageNet has will do,
    and other archives than its own; ``md5=False``: other archives will. Raises UserError where something is wrong with
    the source, with ``out`` or with what is there already; what has been made by then, or by a KeyboardInterrupt, is
    where the next call goes on.
    """
    found = recognise(source)
    stop = threading.Event()
    with alone_in(out), ThreadPoolExecutor(workers or usable_cores()) as pool:
        try:
            shop = Workshop(out)
            before = shop.open(settings)
            classes = _classes(found, before, source, subset)
            with Console(stderr=True).status("listing"):
                sized = dict(zip(classes, pool.map(PictureClass.measured, classes), strict=True))
            _check_same(before, shop, sized, source)
            rest = {of: size for of, size in sized.items() if of.name not in before.splits.get(of.split, {})}
            if not rest and not shop.folder.exists():
                return Prepared(before, found.told, already=True)
            shop.begin(before)
            made = {split: dict(before.splits.get(split, {})) for split in SPLITS}
            with new_bars() as bars:
                if rest and md5 and not subset:
                    check_archives(found.md5, shop.folder, pool, bars, stop)
                check_space(out, rest, settings.resize, settings.quality or 0)
                for of, what in _making(rest, shop, settings, pool, bars, stop):
                    made[of.split][of.name] = what
            splits = {split: dict(sorted(classes.items())) for split, classes in made.items() if classes}
            if not subset:
                _check_counts(splits, source)
            record = Record(settings=settings, splits=splits, others=tuple(sorted({*before.others, *found.others})))
            shop.finish(record)
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                print("stopped; the same command goes on from here", file=sys.stderr)
            raise
    return Prepared(record, found.told, already=False)


def _classes(found: Source, before: Record, source: Path, subset: bool) -> list[PictureClass]:
    """Those of ``source`` that are to be in the result, training first, by name.

    Raises UserError where there are not as many as there should be, or validation has one that training lacks.
    """
    names = {split: {of.name for of in found.classes if of.split == split} for split in SPLITS}
    if not subset:
        for split, there in names.items():
            if len(there) != CLASSES:
                raise UserError(
                    f"{source} has {len(there)} classes of {split}, and ImageNet has {CLASSES}; give all of it, or "
                    "--subset if a part is meant"
                )
    train = names["train"] | before.splits.get("train", {}).keys()
    strangers = sorted(names["val"] - train) if train else []
    if strangers and not subset:
        raise UserError(f"{source} has a class {strangers[0]} to validate on that train lacks; fetch both again")
    if strangers:
        warn(f"{len(strangers)} classes are left out of val, as train lacks them, the first {strangers[0]}")
    kept = [of for of in found.classes if of.split == "train" or of.name not in strangers]
    if not kept:
        raise UserError(f"{source} has no classes in it; give the directory that holds ImageNet with --source DIR")
    return sorted(kept, key=lambda of: (SPLITS.index(of.split), of.name))


def _check_same(before: Record, shop: Workshop, sized: _Sized, source: Path) -> None:
    """Raise UserError where what is there was made from something else, or has been changed since."""
    now = {split: {of.name: size for of, size in sized.items() if of.split == split} for split in SPLITS}
    for split, classes in before.splits.items():
        if not now[split]:  # a source of the other split
            continue
        strangers = {name for name, made in classes.items() if now[split].get(name) != made.size}
        if shop.landed(split):
            strangers |= now[split].keys() - classes.keys()
        if strangers:
            raise UserError(
                f"{shop.out} was made from another source than {source}, by {split}/{min(strangers)}; give that one, "
                "or another --out"
            )
    for split, classes in before.splits.items():
        for name, made in classes.items():
            folder = (shop.out if shop.landed(split) else shop.folder) / split / name
            if not folder.is_dir() or len(os.listdir(folder)) != made.pictures:  # noqa: PTH208  (names alone)
                raise UserError(
                    f"{folder} has not the {made.pictures} pictures any more that were put there; remove "
                    f"{folder.parent}, and it is made again"
                )


def _check_counts(splits: Mapping[str, Mapping[str, Made]], source: Path) -> None:
    for split, expected in PICTURES.items():
        found = sum(made.pictures for made in splits[split].values())
        if found != expected:
            raise UserError(
                f"{source} has {found} pictures of {split}, and ImageNet has {expected}; fetch it again, or give "
                "--subset if that is meant: what has been made is kept"
            )


def _making(
    rest: _Sized, shop: Workshop, settings: Settings, pool: Executor, bars: Progress, stop: threading.Event
) -> Iterator[tuple[PictureClass, Made]]:
    """Classes as they are kept."""
    tasks = {
        split: bars.add_task(split, total=size, pictures=0)
        for split in SPLITS
        if (size := sum(size for of, size in rest.items() if of.split == split))
    }

    def begin(of: PictureClass, size: int) -> Future[Made]:
        def tell(read: int) -> None:
            if stop.is_set():
                raise CancelledError
            bars.advance(tasks[of.split], read)

        return pool.submit(_make, of, size, shop, settings, tell)

    pending = {begin(of, size): of for of, size in rest.items()}
    pictures = dict.fromkeys(SPLITS, 0)
    while pending:
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        ready = {pending[future]: future.result() for future in done if future.exception() is None}
        shop.keep({(of.split, of.name): made for of, made in ready.items()})
        for future in done:
            future.result()
            del pending[future]
        for of, made in ready.items():
            pictures[of.split] += made.pictures
            bars.update(tasks[of.split], pictures=pictures[of.split])
        yield from ready.items()


def _make(of: PictureClass, size: int, shop: Workshop, settings: Settings, tell: Callable[[int], None]) -> Made:
    """Write the pictures of a class, which has ``size`` bytes in the source; ``tell`` is told as they are read."""
    folder = shop.partial(of.split, of.name)
    pictures, read = 0, 0
    left_out, undecodable = [], []
    for file in of.listed():
        if not file.is_picture:
            left_out.append(file.shown)
            continue
        content = file.read()
        if settings.resize is not None and settings.quality is not None:
            try:
                content = shrunk(content, settings.resize, settings.quality)
            except Undecodable:
                undecodable.append(file.shown)
        try:
            with (folder / file.name).open("xb") as target:
                target.write(content)
        except OSError as error:
            raise UserError(
                f"{shop.out} cannot be written to ({error.strerror}); put that right, and the same command goes on"
            ) from None
        pictures += 1
        read += file.size
        tell(file.size)
    if not pictures:
        raise UserError(f"{of.path} has no pictures in the source; add them, or leave that class out")
    tell(max(0, size - read))
    return Made(pictures=pictures, size=size, left_out=tuple(sorted(left_out)), undecodable=tuple(sorted(undecodable)))


def report(prepared: Prepared, out: Path) -> Iterator[str]:
    """What a person should know of it, in lines."""
    record = prepared.record
    yield f"{out} {'holds already' if prepared.already else 'now holds'}, from {prepared.source}:"
    for split, classes in record.splits.items():
        yield f"  {split:<5}  {sum(made.pictures for made in classes.values())} pictures in {len(classes)} classes"
    every = [(f"{split}/{name}", made) for split, classes in record.splits.items() for name, made in classes.items()]
    left_out = [*record.others] + [f"{path}/{file}" for path, made in every for file in made.left_out]
    undecodable = [f"{path}/{file}" for path, made in every for file in made.undecodable]
    if left_out:
        yield f"left out, as they are no pictures: {_first(left_out)}"
    if undecodable:
        yield f"copied as they are, as they cannot be decoded: {_first(undecodable)}"
    if left_out or undecodable:
        yield f"all of their names are in {out / RECORD}"


def _first(paths: Sequence[str]) -> str:
    most = 3
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
