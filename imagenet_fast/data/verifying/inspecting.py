"""What is in one file that calls itself a picture."""

from __future__ import annotations

import hashlib
from io import BytesIO
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from imagenet_fast.data.imagefolder import SUFFIXES

KINDS = ("empty", "AppleDouble", "no picture", "wrong type", "truncated", "damaged", "unreadable")
"""Of files that loaders cannot read."""

NOTES = ("CMYK", "turned by EXIF", "named otherwise")
"""Of pictures that need care, which the loaders take."""

_READ = {"JPEG": (".jpg", ".jpeg"), "MPO": (".jpg", ".jpeg"), "PNG": (".png",), "BMP": (".bmp",), "WEBP": (".webp",)}
"""The formats that loaders read, and what such files are called."""

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_ORIENTATION = 0x0112


class Look(NamedTuple):
    kind: str
    """One of KINDS, or nothing for a picture."""
    what: str
    """In the decoder's words."""
    notes: tuple[str, ...]
    width: int
    height: int
    digest: int
    """64 bits of the content."""


def examine(name: str, content: bytes) -> Look:
    """Decode all of the file ``name``; without a suffix it is told of no format."""
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())

    def bad(kind: str, what: object = "") -> Look:
        return Look(kind, str(what), (), 0, 0, digest)

    if name.startswith("._") or content.startswith(_APPLE_DOUBLE):
        return bad("AppleDouble")
    if not content:
        return bad("empty")
    try:
        with Image.open(BytesIO(content)) as picture:
            if picture.format not in _READ:
                return bad("wrong type", picture.format)
            picture.load()
            notes = (
                picture.mode == "CMYK",
                _orientation(picture) not in (0, 1),
                name.lower().endswith(SUFFIXES) and not name.lower().endswith(_READ[picture.format]),
            )
            return Look("", "", tuple(n for n, is_so in zip(NOTES, notes, strict=True) if is_so), *picture.size, digest)
    except UnidentifiedImageError:
        return bad("damaged" if content.startswith(_MAGIC) else "no picture")
    except Exception as error:  # decoders raise of many kinds, SyntaxError and struct.error among them
        return bad("truncated" if "truncated" in str(error).lower() else "damaged", error)


def _orientation(picture: Image.Image) -> int:
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF is not read by loaders: whatever is wrong with it does not matter
        return 1
