"""Write one checkpoint from all ranks: its directory, each rank's files, and the manifest once all are there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from imagenet_fast.checkpoint.manifest import FileSum, Manifest, NotSaved, Stamp, write_durably
from imagenet_fast.checkpoint.retention import new_folder, remove, retain, survey
from imagenet_fast.checkpoint.store_coordination import Leaving, RankReply, RankTimeout, StoreCoordinator
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import warn

_MAKE_ROOM = "free space there"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM, errno.EDQUOT: _MAKE_ROOM, errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "make it writable", errno.EACCES: "make it writable", errno.EPERM: "make it writable",
    errno.ENOMEM: "give ranks more memory, or raise `ulimit -l`",
    errno.ENOENT: "have every node see that directory, and nobody remove it",
}  # fmt: skip

_FOR_RANK_0 = 5  # times as long others wait for rank 0: it writes the shared file, then waits for all
_CONFIRMED_S = 30.0  # seconds in which a rank that lives has read the result


def write_checkpoint(
    root: Path,
    place: RankInfo,
    coordinator: StoreCoordinator,
    stamp: Stamp,
    files: Mapping[str, Iterable[bytes | memoryview]],
    keep: int,
    timeout_s: float,
) -> Path:
    """Write this rank's files into a new checkpoint, and return its directory when all ranks have written theirs.

    Rank 0 then removes checkpoints that are not kept. After a failure, nothing of the new checkpoint is left. If the
    disk was full, only the newest and the best checkpoint are left.

    Args:
        root: Directory of the checkpoints.
        place: This rank.
        coordinator: Messages between the ranks about this checkpoint.
        stamp: The step and the run.
        files: Content of this rank's files, by name.
        keep: Checkpoints kept besides the newest and the best.
        timeout_s: Seconds for which a rank may be silent after rank 0 has written.

    Raises:
        NotSaved: On all ranks alike, if one of them could not write, or was silent for ``timeout_s``.
        RankTimeout: Rank 0 is silent.
        Leaving: This rank gives up the checkpoint.
    """
    if place.is_main:
        begun = _tried(place, lambda: new_folder(root, stamp.step).name)
        coordinator.write("folder", _refused(root, [begun]) if begun.failure else begun)
    (result,) = coordinator.read(["folder"], _FOR_RANK_0 * timeout_s)
    if not result.failure:
        folder = root / str(result.content)
        coordinator.write(f"part/{place.rank}", _tried(place, lambda: _write_files(folder, files)))
        if place.is_main:
            sealed = _conclude(root, place, coordinator, folder, stamp, timeout_s)
            if not sealed.failure:
                # Before others are told: it may take long, and those that train on would wait for this rank in vain.
                tidied(lambda: retain(root, keep))
            coordinator.write("result", sealed)
        (result,) = coordinator.read(["result"], _FOR_RANK_0 * timeout_s)
    coordinator.confirm()
    if place.is_main:
        if result.failure and result.remedy == _MAKE_ROOM:
            tidied(lambda: retain(root, 0))
        coordinator.clear(min(timeout_s, _CONFIRMED_S))
    if result.failure:
        failure = f"the checkpoint of step {stamp.step} failed: {result.failure}"
        raise NotSaved(failure, result.remedy, str(result.content))
    return folder


def tidied(attempt: Callable[[], object]) -> None:
    """Run ``attempt``, which removes files that are no longer needed; if it fails, warn and go on."""
    try:
        attempt()
    except OSError as error:
        warn(f"{error.filename} cannot be removed ({error.strerror}); remove it by hand")


def _conclude(
    root: Path, place: RankInfo, coordinator: StoreCoordinator, folder: Path, stamp: Stamp, timeout_s: float
) -> RankReply:
    """Write the manifest once all parts are there, on rank 0; if some are missing, remove the directory."""
    try:
        parts = coordinator.read([f"part/{rank}" for rank in range(place.size)], timeout_s)
    except RankTimeout as silence:
        late = ", ".join(key.removeprefix("part/") for key in silence.missing)
        failure = f"rank {late} did not write its part within {timeout_s:g} s"
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
    """Return the reply to all ranks about those that failed."""
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


def _write_files(folder: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> dict[str, Any]:
    return {name: write_durably(folder / name, chunks).model_dump() for name, chunks in files.items()}


def _tried(place: RankInfo, attempt: Callable[[], Any]) -> RankReply:
    """Return the result of ``attempt`` as a reply for the other ranks."""
    who = f"rank {place.rank} on {socket.gethostname()}: " if place.size > 1 else ""
    try:
        return RankReply(attempt())
    except Leaving:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see to that disk")
        return RankReply(failure=f"{who}{error.filename} cannot be written ({error.strerror})", remedy=remedy)
    except Exception as error:  # else a bug of ours would leave the other ranks waiting
        return RankReply(failure=f"{who}{type(error).__name__}: {error}", remedy="report this")
