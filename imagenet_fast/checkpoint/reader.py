"""Checkpoints found again, and read: whole ones only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from imagenet_fast.checkpoint.durable_io import FileSum, sum_of
from imagenet_fast.checkpoint.manifest import SHARED, CorruptCheckpoint, Manifest, part_name, read_manifest
from imagenet_fast.checkpoint.retention import by_merit, survey
from imagenet_fast.checkpoint.serialization import Tree
from imagenet_fast.checkpoint.staging import read_tree
from imagenet_fast.errors import UserError, warn

_CPU = torch.device("cpu")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Checkpoint:
    """One directory and what its manifest says."""

    folder: Path
    manifest: Manifest

    def shared(self, device: torch.device = _CPU) -> Tree:
        """What all ranks hold alike; None where nothing was saved. ``device`` takes what lay on an accelerator.

        Raises UserError where the file is not what the manifest says, as does :meth:`part`.
        """
        return self._read(SHARED, device)

    def part(self, rank: int, device: torch.device = _CPU) -> Tree:
        """What was ``rank``'s own, of the ranks there were; None where it saved nothing."""
        return self._read(part_name(rank), device)

    def parts(self, device: torch.device = _CPU) -> Iterator[tuple[int, Tree]]:
        """Every rank that had something of its own, and what: one at a time, for they may be many."""
        for rank in range(self.manifest.world):
            if part_name(rank) in self.manifest.files:
                yield rank, self.part(rank, device)

    def verify(self) -> None:
        """Raises Damaged where a file is not what the manifest says."""
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
            raise UserError(f"{self.folder} is damaged: {what}; resume from another checkpoint") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """That in ``folder``. Raises UserError where there is none, or its manifest is damaged."""
    try:
        return Checkpoint(folder, read_manifest(folder))
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint, or not a complete one; give another") from None
    except CorruptCheckpoint as error:
        raise UserError(f"{folder} is damaged: {error}; give another") from None


def newest(root: Path) -> Checkpoint | None:
    """The last checkpoint under ``root`` that is whole; None if there has never been one.

    All its files are read for that, so one rank looks and tells the others. Damaged ones are named on stderr. Raises
    UserError where there is no other, or ``root`` cannot be read.
    """
    found, damaged = _survey(root)
    return _first_whole(root, found, found, damaged)


def best(root: Path) -> Checkpoint | None:
    """That with the highest top-1 of those that are whole; None if none was evaluated. As :func:`newest` otherwise."""
    found, damaged = _survey(root)
    return _first_whole(root, by_merit(found), found, damaged)


def _survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
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
        raise UserError(f"no checkpoint in {root} is whole ({listed}); remove them to start from the beginning")
    return None


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _check_size(path: Path, expected: int) -> None:
    """Before it is read: a pipe or a device may have no end. Raises OSError too."""
    if path.exists() and not path.is_file():
        raise CorruptCheckpoint(path, "is no file")
    if (found := path.stat().st_size) != expected:
        raise CorruptCheckpoint(path, f"has {found} bytes instead of {expected}")


def _check_sum(path: Path, expected: FileSum, found: FileSum) -> None:
    if found != expected:
        raise CorruptCheckpoint(path, f"has the CRC-32 {found.crc32} instead of {expected.crc32}")
