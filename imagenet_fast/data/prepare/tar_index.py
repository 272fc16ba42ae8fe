"""List what a tar holds and where, without unpacking it; reject members that could be written elsewhere than stated."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagenet_fast.data.archives import tar_members
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.errors import UserError


@dataclass(frozen=True, slots=True)
class Member(SourceFile):
    """A regular file at the top level of a tar, which lies in a file itself."""

    header: int
    """Offset of the member's header in that file."""


def members(tar: Path, within: Member | None = None) -> list[Member]:
    """Return the members of the tar in the file ``tar``. Only headers are read.

    Args:
        tar: The file.
        within: A member of ``tar`` that is itself a tar, to list instead; None for ``tar`` itself.

    Raises:
        UserError: It is not a tar, is truncated or damaged, or has a member twice. Also if a member is not a regular
            file at the top level (a link, a device, a folder, a path that leads elsewhere).
    """
    told = str(tar) if within is None else f"'{within.name}' in {tar}"
    with tar.open("rb") as file:
        if within is None:
            return list(_members(file, tar, told, 0))
        file.seek(within.header)
        with tarfile.open(fileobj=file, mode="r:") as outer:
            inner = outer.extractfile(_first(outer))
            assert inner is not None
            return list(_members(inner, tar, told, within.offset))


def member(tar: Path, name: str, most: int) -> bytes:
    """Return the content of one file of a tar, compressed or not.

    Args:
        tar: The tar.
        name: The path of the file in the tar.
        most: The most bytes that the file may have.

    Raises:
        UserError: There is no such file, it has more than ``most`` bytes, or the tar cannot be read.
    """
    try:
        with tarfile.open(tar) as archive:
            found = archive.getmember(name)
            if not found.isreg() or found.size > most:
                raise KeyError(name)
            content = archive.extractfile(found)
            assert content is not None
            return content.read()
    except KeyError:
        raise UserError(f"{tar} does not hold {name} as it should; fetch it again") from None
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:  # the latter two from gzip and zlib
        raise UserError(f"{tar} cannot be read ({error}); fetch it again") from None


def _first(archive: tarfile.TarFile) -> tarfile.TarInfo:
    found = archive.next()
    assert found is not None
    return found


def _members(stream: IO[bytes], tar: Path, told: str, begin: int) -> Iterator[Member]:
    seen: set[str] = set()
    for info in tar_members(stream, told, "fetch it again"):
        name = info.name.removeprefix("./")
        if info.isdir() and name in ("", "."):
            continue
        _check(info, name, told)
        if name in seen:
            raise UserError(f"{told} has the member '{name}' twice; fetch it again")
        seen.add(name)
        yield Member(name, str(tar), begin + info.offset_data, info.size, begin + info.offset)


def _check(info: tarfile.TarInfo, name: str, told: str) -> None:
    match info.type:
        case tarfile.REGTYPE | tarfile.AREGTYPE if info.size >= 0 and not info.issparse():
            what = "a path that leads elsewhere" if "/" in name or "\0" in name or name in ("", ".", "..") else ""
        case tarfile.LNKTYPE | tarfile.SYMTYPE:
            what = "a link"
        case tarfile.CHRTYPE | tarfile.BLKTYPE | tarfile.FIFOTYPE:
            what = "a device"
        case tarfile.DIRTYPE:
            what = "a folder"
        case _:
            what = "no plain file"
    if what:
        raise UserError(
            f"{told} has a member '{info.name}' that is {what}, and nothing is unpacked from it; "
            "ImageNet's own tars hold plain files alone, so fetch it again"
        )
