"""Every file of a data directory decoded, in as many threads as there are cores."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from imagenet_fast.data.appearing import write_whole
from imagenet_fast.data.imagefolder import SUFFIXES
from imagenet_fast.data.preparing.workshop import SPLITS
from imagenet_fast.data.quarantine import QUARANTINE, quarantine_text
from imagenet_fast.data.verifying.inspecting import Look, examine
from imagenet_fast.errors import UserError
from imagenet_fast.ranks.cores import usable_cores

_CHUNK = 64  # files that a thread takes at once


@dataclass(frozen=True)
class Verified:
    """What was found; files are told by their paths below the data directory."""

    counts: dict[str, dict[str, int]]
    """Good pictures of each split's classes."""
    bad: dict[str, str]
    """What is wrong with the files in quarantine."""
    kinds: dict[str, int]
    """How many of them are of each kind."""
    notes: dict[str, list[str]]
    """Pictures that need care."""
    duplicates: list[list[str]]
    """Pictures of the same bytes."""
    sizes: NDArray[np.int32]
    """Of the good pictures: width, height [pictures, 2]."""

    @property
    def leaks(self) -> list[list[str]]:
        """Duplicates that are trained on and validated on."""
        return [same for same in self.duplicates if len({path.partition("/")[0] for path in same}) > 1]

    @property
    def contradictions(self) -> list[list[str]]:
        """Duplicates of several classes."""
        return [same for same in self.duplicates if len({path.split("/")[1] for path in same}) > 1]


def verify(root: Path, workers: int | None = None) -> Verified:
    """Read all of ``root``, and leave the list of what cannot be decoded in it, by which `train` leaves those out.

    Raises UserError where there is nothing to read, or the list cannot be written.
    """
    files = [path for split in SPLITS for path in _listed(root, split)]
    if not files:
        raise UserError(f"{root} holds no pictures in train/<class> or val/<class>; give another with --data DIR")
    if not os.access(root, os.W_OK):
        raise UserError(f"{root} cannot be written to, and {QUARANTINE} belongs there; have it made yours")
    digests = np.zeros(len(files), np.uint64)
    sizes = np.zeros((len(files), 2), np.int32)
    bad: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    notes: dict[str, list[str]] = {}
    for index, look in enumerate(_looks(root, files, workers or usable_cores())):
        digests[index] = look.digest
        sizes[index] = look.width, look.height
        if look.kind:
            bad[files[index]] = f"{look.kind}: {look.what}" if look.what else look.kind
            kinds[look.kind] += 1
        for note in look.notes:
            notes.setdefault(note, []).append(files[index])
    good = np.array([path not in bad for path in files])
    write_whole(root / QUARANTINE, quarantine_text(bad))
    return Verified(
        _counts(files, good), bad, dict(kinds), notes, _duplicates(files, digests, np.flatnonzero(good)), sizes[good]
    )


def _listed(root: Path, split: str) -> Iterator[str]:
    """What loaders would take for pictures, and AppleDouble files, which they would too."""
    if not (root / split).is_dir():
        return
    for name in sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir()):
        with os.scandir(root / split / name) as entries:
            yield from sorted(f"{split}/{name}/{e.name}" for e in entries if e.name.lower().endswith(SUFFIXES))


def _looks(root: Path, files: Sequence[str], workers: int) -> Iterator[Look]:
    """At each file, in their order."""
    stop = threading.Event()
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip

    def look(begin: int) -> list[Look]:
        found = []
        for path in files[begin : begin + _CHUNK]:
            if stop.is_set():
                raise CancelledError
            found.append(_look(root, path))
        return found

    with ThreadPoolExecutor(workers) as pool, bars, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # of pictures that are large, or have odd EXIF
        task = bars.add_task("decoding", total=len(files), rate="")
        try:
            for looks in pool.map(look, range(0, len(files), _CHUNK)):
                bars.advance(task, len(looks))
                bars.update(task, rate=f"{bars.tasks[0].completed / (bars.tasks[0].elapsed or 1):.0f} pictures/s")
                yield from looks
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _look(root: Path, path: str) -> Look:
    try:
        content = (root / path).read_bytes()
    except OSError as error:
        return Look("unreadable", error.strerror or "", (), 0, 0, 0)
    return examine(path.rpartition("/")[2], content)


def _counts(files: Sequence[str], good: NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for path, is_good in zip(files, good.tolist(), strict=True):
        split, name, _ = path.split("/")
        of = counts.setdefault(split, {})
        of[name] = of.get(name, 0) + is_good
    return counts


def _duplicates(files: Sequence[str], digests: NDArray[np.uint64], good: NDArray[np.int64]) -> list[list[str]]:
    """Groups of them, each in the order of ``files``."""
    order = good[np.argsort(digests[good], kind="stable")]
    same_as_next = digests[order][1:] == digests[order][:-1]
    groups: list[list[str]] = []
    last = -1
    for place in np.flatnonzero(same_as_next).tolist():
        if place != last:
            groups.append([files[order[place]]])
        groups[-1].append(files[order[place + 1]])
        last = place + 1
    return sorted(groups)


def summary(found: Verified, root: Path) -> Iterator[str]:
    """For a person, in lines that fit a screen."""
    for split, classes in found.counts.items():
        counts = sorted(classes.values())
        yield (
            f"{split:<5}  {sum(counts)} pictures in {len(counts)} classes: {counts[0]} to {counts[-1]} in each, "
            f"{counts[len(counts) // 2]} in the median"
        )
    if len(found.sizes):
        (width, height), (most_wide, most_high) = np.median(found.sizes, axis=0), found.sizes.max(axis=0)
        yield f"pixels  {width:.0f} x {height:.0f} in the median, up to {most_wide} wide and {most_high} high"
    for note, paths in found.notes.items():
        yield f"noted, and kept: {len(paths)} {note}, as {paths[0]}"
    if found.duplicates:
        yield (
            f"noted, and kept: {len(found.duplicates)} pictures that are there several times, "
            f"{len(found.contradictions)} of them in several classes, {len(found.leaks)} in both splits"
        )
        for same in (found.leaks or found.contradictions or found.duplicates)[:1]:
            yield f"  {' = '.join(same[:3])}"
    for kind, count in sorted(found.kinds.items()):
        first = next(path for path, what in found.bad.items() if what.startswith(kind))
        yield f"quarantined: {count} {kind}, as {first}"
    empty = [f"{split}/{name}" for split, classes in found.counts.items() for name, n in classes.items() if not n]
    if empty:
        yield f"without a single picture: {len(empty)} class folders, as {empty[0]}"
    if found.bad:
        yield f"`train` leaves out what is in {root / QUARANTINE}"
    else:
        yield "every file is a picture that can be decoded"


def as_json(found: Verified) -> dict[str, Any]:
    """All of it but the sizes one by one."""
    return {
        "classes": found.counts,
        "quarantine": found.bad,
        "noted": found.notes,
        "duplicates": found.duplicates,
        "in_both_splits": found.leaks,
        "in_several_classes": found.contradictions,
    }
