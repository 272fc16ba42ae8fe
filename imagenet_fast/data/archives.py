"""Walk through tars up to an end that is whole."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO

from imagenet_fast.errors import UserError

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
"""The first bytes of files by gzip, bzip2, xz, zstd and lz4."""

_PIECE = 1 << 20  # bytes


def tar_members(file: IO[bytes], told: str, advice: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar, called ``told``; only their headers are read, and all that follows the last of them.

    A tar ends with zeros up to the end of its file. Zeros that something follows are a hole, as a failing disk leaves.

    Raises:
        UserError: It is no tar, or compressed, truncated or damaged, or has a member that is neither a plain file nor a
            folder; the message ends with the ``advice``.
    """
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0 or tar.offset <= end:
                    raise tarfile.ReadError("a size below 0")
                end = tar.offset
                if not (member.isreg() or member.isdir()) or member.issparse():
                    raise UserError(f"{told}: {member.name} is no plain file but a link or the like; {advice}")
                yield member
    except (tarfile.TarError, ValueError, OverflowError) as error:
        file.seek(0)
        if file.read(8).startswith(_COMPRESSED):
            raise UserError(f"{told} is compressed, so that no image in it can be read on its own; unpack it") from None
        raise UserError(f"{told} is no whole tar file ({error}); {advice}") from None
    at = file.seek(end)
    while piece := file.read(_PIECE):
        if piece.strip(b"\0"):
            raise UserError(f"{told} is damaged at byte {end}, where neither a file nor its end follows; {advice}")
        at += len(piece)
    if at < end + tarfile.BLOCKSIZE:
        raise UserError(f"{told} ends without an end mark at byte {end}; {advice}")
