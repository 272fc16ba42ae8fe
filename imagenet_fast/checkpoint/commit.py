"""One checkpoint, written by all ranks: its directory, each rank's files, and the manifest once all are there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from imagenet_fast.checkpoint.durable_io import FileSum, write_durably
from imagenet_fast.checkpoint.manifest import CorruptCheckpoint, Manifest, NotSaved, Stamp
from imagenet_fast.checkpoint.reader import Checkpoint
from imagenet_fast.checkpoint.retention import first_is_there, new_folder, remove, retain, survey
from imagenet_fast.checkpoint.store_coordination import Leaving, RankReply, RankTimeout, StoreCoordinator
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.errors import warn

_MAKE_ROOM = "free space there"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM, errno.EDQUOT: _MAKE_ROOM, errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "make it writable", errno.EACCES: "make it writable", errno.EPERM: "make it writable",
    errno.ENOENT: "have every node see that directory, and nobody remove it",
}  # fmt: skip

_FOR_RANK_0 = 5  # times the patience is it waited for: it writes what all share, and then waits for all others
_CONFIRMED_S = 30.0  # in which a rank that lives has seen what became of the checkpoint


def write_checkpoint(
    root: Path,
    place: RankInfo,
    letters: StoreCoordinator,
    stamp: Stamp,
    files: Mapping[str, Iterable[bytes | memoryview]],
    keep: int,
    patience_s: float,
    known: dict[Path, bool],
) -> Path:
    """Write ``files``, this rank's, into a new checkpoint under ``root``, and return it when all ranks have.

    Rank 0 then removes what need not stay. Raises NotSaved, on all ranks alike, where any of them could not write;
    nothing is left then of what was to be this checkpoint, and on a full disk nothing beside the newest and the best
    one. It is such a failure, too, if a rank is silent for
    ``patience_s`` after rank 0 has written; where rank 0 itself is, Silence is raised. ``known``: which checkpoints
    are whole, as far as this process has written or read them.
    """
    if place.is_main:
        begun = _tried(place, lambda: new_folder(root, stamp.step).name)
        letters.write("folder", _refused(root, [begun]) if begun.failure else begun)
    (verdict,) = letters.read(["folder"], _FOR_RANK_0 * patience_s)
    if not verdict.failure:
        folder = root / str(verdict.content)
        letters.write(f"part/{place.rank}", _tried(place, lambda: _write_files(folder, files)))
        if place.is_main:
            letters.write("verdict", _conclude(root, place, letters, folder, stamp, patience_s))
        (verdict,) = letters.read(["verdict"], _FOR_RANK_0 * patience_s)
    letters.confirm()
    removed: list[Path] = []
    if place.is_main:
        if not verdict.failure:
            known[folder] = True
            tidied(lambda: retain(root, keep, partial(_is_whole, known)))
        elif verdict.remedy == _MAKE_ROOM:
            tidied(lambda: removed.extend(retain(root, 0, partial(_is_whole, known))))
        letters.clear(min(patience_s, _CONFIRMED_S))
    if verdict.failure:
        failure = f"the checkpoint of step {stamp.step} failed: {verdict.failure}"
        raise NotSaved(failure, verdict.remedy, str(verdict.content), freed=bool(removed))
    return folder


def _is_whole(known: dict[Path, bool], folder: Path, manifest: Manifest) -> bool:
    """Reads it only once: it is the best one, and stays so for long."""
    if folder not in known:
        try:
            Checkpoint(folder, manifest).verify()
            known[folder] = True
        except CorruptCheckpoint as error:
            known[folder] = False
            warn(f"checkpoint {folder} is damaged: {error}; it does not count as the best one")
    return known[folder]


def tidied(attempt: Callable[[], object]) -> None:
    """What is of no use any more may stay if it must, but not in silence."""
    try:
        attempt()
    except OSError as error:
        warn(f"{error.filename} cannot be removed ({error.strerror}); remove it by hand")


def _conclude(
    root: Path, place: RankInfo, letters: StoreCoordinator, folder: Path, stamp: Stamp, patience_s: float
) -> RankReply:
    """On rank 0: write the manifest once all parts are there; where they are not, remove what there is."""
    try:
        parts = letters.read([f"part/{rank}" for rank in range(place.size)], patience_s)
    except RankTimeout as silence:
        late = ", ".join(key.removeprefix("part/") for key in silence.missing)
        failure = f"rank {late} did not write its part within {patience_s:g} s"
        parts = [RankReply(failure=failure, remedy="see its output, and whether its disk is slow")]
    failed = [part for part in parts if part.failure]
    if not failed:
        sealed = _tried(place, lambda: _seal(root, folder, stamp, parts))
        if not sealed.failure:
            return sealed
        failed = [sealed]
    with suppress(OSError):
        remove(folder)
    return _refused(root, failed)


def _refused(root: Path, failed: list[RankReply]) -> RankReply:
    """What the ranks are told of those that failed."""
    before: dict[Path, Manifest] = {}
    with suppress(OSError):
        before, _ = survey(root)
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    then = next((f"resume from {folder.name}" for folder in before), "start again")
    return RankReply(then, failed[0].failure + more, failed[0].remedy)


def _seal(root: Path, folder: Path, stamp: Stamp, parts: list[RankReply]) -> None:
    before, _ = survey(root)
    number = 1 + max((manifest.number for manifest in before.values()), default=0)
    files = {name: FileSum(**found) for part in parts for name, found in part.content.items()}
    Manifest(**dict(stamp), number=number, files=files).write(folder)
    with suppress(OSError):  # the next one takes it away
        first_is_there(root)


def _write_files(folder: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> dict[str, Any]:
    return {name: write_durably(folder / name, chunks).model_dump() for name, chunks in files.items()}


def _tried(place: RankInfo, attempt: Callable[[], Any]) -> RankReply:
    """What came of it, for the others to read."""
    who = f"rank {place.rank} on {socket.gethostname()}: " if place.size > 1 else ""
    try:
        return RankReply(attempt())
    except Leaving:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see to that disk")
        return RankReply(failure=f"{who}{error.filename} cannot be written ({error.strerror})", remedy=remedy)
    except Exception as error:  # else the others would wait for a rank that has stumbled over a defect of ours
        return RankReply(failure=f"{who}{type(error).__name__}: {error}", remedy="report this")
