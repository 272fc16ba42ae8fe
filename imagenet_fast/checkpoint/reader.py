"""Find and read checkpoints; only whole ones count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from imagenet_fast.checkpoint.manifest import (
    SHARED,
    CorruptCheckpoint,
    FileSum,
    Manifest,
    part_name,
    read_manifest,
    sum_of,
)
from imagenet_fast.checkpoint.retention import by_merit, survey
from imagenet_fast.checkpoint.serialization import Tree
from imagenet_fast.checkpoint.staging import read_tree
from imagenet_fast.errors import UserError, warn

_CPU = torch.device("cpu")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its directory and manifest."""

    folder: Path
    manifest: Manifest

    def shared(self, device: torch.device = _CPU) -> Tree:
        """Return what all ranks hold alike; None if nothing was saved.

        Args:
            device: Device for tensors that were on an accelerator.

        Raises:
            UserError: The file disagrees with the manifest, or cannot be read.
        """
        return self._read(SHARED, device)

    def part(self, rank: int, device: torch.device = _CPU) -> Tree:
        """Return what only ``rank`` held, of the ranks there were; None if it saved nothing.

        Args:
            rank: Rank in the run that saved the checkpoint.
            device: Device for tensors that were on an accelerator.

        Raises:
            UserError: The file disagrees with the manifest, or cannot be read.
        """
        return self._read(part_name(rank), device)

    def parts(self, device: torch.device = _CPU) -> Iterator[tuple[int, Tree]]:
        """Yield every rank that saved a part, and the part; one at a time, since they may be many.

        Args:
            device: Device for tensors that were on an accelerator.

        Raises:
            UserError: A file disagrees with the manifest, or cannot be read.
        """
        for rank in range(self.manifest.world):
            if part_name(rank) in self.manifest.files:
                yield rank, self.part(rank, device)

    def verify(self) -> None:
        """Check every file against the manifest.

        Raises:
            CorruptCheckpoint: A file differs, or cannot be read.
        """
        for name, expected in self.manifest.files.items():
            path = self.folder / name
            try:
                _check_size(path, expected.size)
                _check_sum(path, expected, sum_of(_read_chunks(path)))
            except OSError as error:
                raise CorruptCheckpoint(path, f"cannot be read ({error.strerror})") from None

    def _read(self, name: str, device: torch.device) -> Tree:
        if name not in self.manifest.files:
            return None
        path, expected = self.folder / name, self.manifest.files[name]
        try:
            _check_size(path, expected.size)
            data = path.read_bytes()
            _check_sum(path, expected, sum_of([data]))
            return read_tree(data, device)
        except (OSError, ValueError, CorruptCheckpoint) as error:
            what = error if isinstance(error, CorruptCheckpoint) else f"{name} {error}"
            raise UserError(f"{self.folder} is damaged: {what}; give another checkpoint") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``.

    Raises:
        UserError: There is none, or its manifest is damaged.
    """
    try:
        return Checkpoint(folder, read_manifest(folder))
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint, or not a complete one; give another") from None
    except CorruptCheckpoint as error:
        raise UserError(f"{folder} is damaged: {error}; give another") from None


def newest(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint under ``root`` that is whole; None if there has never been one.

    All its files are read to check it, so only one rank should do this and tell the others. Damaged checkpoints are
    reported on stderr.

    Raises:
        UserError: All checkpoints are damaged, or ``root`` cannot be read.
    """
    found, damaged = read_survey(root)
    return _first_whole(root, found, found, damaged)


def best(root: Path) -> Checkpoint | None:
    """Return the whole checkpoint with the highest top-1; None if none was evaluated.

    Otherwise as ``newest``.

    Raises:
        UserError: As ``newest``.
    """
    found, damaged = read_survey(root)
    return _first_whole(root, by_merit(found), found, damaged)


def chosen_checkpoint(root: Path, which: str, final: bool = False) -> Checkpoint:
    """Return the checkpoint that ``RUN@WHICH`` names.

    Args:
        root: The directory of the run's checkpoints.
        which: ``best``, ``newest``, ``latest``, ``step-N``, ``N``, or the name of the checkpoint's directory. Of
            several checkpoints of one step, the newest is taken.
        final: Whether the run has final weights, which the message then lists.

    Raises:
        UserError: There is no such checkpoint; the message lists those that exist. Or the directory cannot be read.
    """
    found, _ = read_survey(root)
    match which:
        case "best":
            chosen = best(root)
        case "newest" | "latest":
            chosen = newest(root)
        case _:
            named = which.removeprefix("step-")
            same = [
                f for f, about in found.items() if f.name == which or (named.isdecimal() and about.step == int(named))
            ]
            chosen = Checkpoint(same[0], found[same[0]]) if same else None  # the survey lists the newest first
    if chosen is None:
        raise UserError(f"{root.parent} has no checkpoint '{which}'{_instead(found, which, final)}")
    return chosen


def _instead(found: dict[Path, Manifest], which: str, final: bool) -> str:
    """Return the end of an error message: what to give in place of ``which``."""
    if not found:
        return "; it holds none" + (", but final weights: leave the @ out" if final else "; give another run")
    evaluated = any(manifest.top1 is not None for manifest in found.values())
    why = ": none of its checkpoints was evaluated" if which == "best" else ""
    steps = [f"step-{step}" for step in sorted({manifest.step for manifest in found.values()})]
    names = [*["best"] * evaluated, "newest", *["final"] * final, *steps]
    return f"{why}; there are {', '.join(names)}"


def read_survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
    """Return what ``survey`` does. Raises UserError if ``root`` cannot be read."""
    try:
        return survey(root)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); see to that, or give another") from None


def _first_whole(
    root: Path, order: Iterable[Path], found: dict[Path, Manifest], damaged: dict[Path, CorruptCheckpoint]
) -> Checkpoint | None:
    damaged = damaged.copy()
    for folder in order:
        checkpoint = Checkpoint(folder, found[folder])
        try:
            checkpoint.verify()
        except CorruptCheckpoint as error:
            damaged[folder] = error
            continue
        for other, what in damaged.items():
            warn(f"checkpoint {other} is damaged: {what}; {folder.name} is taken instead")
        return checkpoint
    if damaged:
        listed = "; ".join(f"{folder.name}: {what}" for folder, what in damaged.items())
        raise UserError(
            f"no checkpoint in {root} can be read ({listed}); restore one, or begin anew in another directory"
        )
    return None


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _check_size(path: Path, expected: int) -> None:
    """Raise CorruptCheckpoint, or OSError, before reading: a pipe or device may have no end."""
    if path.exists() and not path.is_file():
        raise CorruptCheckpoint(path, "is no file")
    if (found := path.stat().st_size) != expected:
        raise CorruptCheckpoint(path, f"has {found} bytes instead of {expected}")


def _check_sum(path: Path, expected: FileSum, found: FileSum) -> None:
    if found != expected:
        raise CorruptCheckpoint(path, f"has the CRC-32 {found.crc32} instead of {expected.crc32}")
