"""Check one file that should be an image."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from imagenet_fast.data.decode import NO_IMAGE, decode
from imagenet_fast.data.image_source import ImageDecodeError

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"


class Look(NamedTuple):
    """The result of checking one file."""

    kind: str
    """empty, AppleDouble, no image, truncated, damaged or unreadable; nothing for a good image."""
    what: str
    """The decoder's error message."""
    digest: int
    """64-bit hash of the content."""


def examine(name: str, content: bytes) -> Look:
    """Decode all of the file ``name`` as loaders do, so that both agree on what is bad."""
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())

    def bad(kind: str, what: object = "") -> Look:
        return Look(kind, str(what), digest)

    if name.startswith("._") or content.startswith(_APPLE_DOUBLE):
        return bad("AppleDouble")
    if not content:
        return bad("empty")
    try:
        decode(content)
    except ImageDecodeError as error:
        if str(error) == NO_IMAGE:
            return bad("damaged" if content.startswith(_MAGIC) else "no image")
        return bad("truncated" if "truncated" in str(error).lower() else "damaged", error)
    return Look("", "", digest)
