"""What is in one file that calls itself an image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple

from PIL import Image

from imagenet_fast.data.decode import NO_IMAGE, ImageDecodeError, decode
from imagenet_fast.data.image_names import SUFFIXES

KINDS = ("empty", "AppleDouble", "no image", "truncated", "damaged", "unreadable")
"""Of files that loaders cannot read."""

NOTES = ("CMYK", "turned by EXIF", "named otherwise")
"""Of images that need care, which the loaders take."""

_NAMED = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "PPM": (".ppm", ".pgm"),
}
"""What files of each format are called."""

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_ORIENTATION = 0x0112


class Look(NamedTuple):
    kind: str
    """One of KINDS, or nothing for an image."""
    what: str
    """In the decoder's words."""
    notes: tuple[str, ...]
    width: int
    height: int
    digest: int
    """64 bits of the content."""


def examine(name: str, content: bytes) -> Look:
    """Decode all of the file ``name`` as loaders do, so that they agree; without a suffix it is told of no format."""
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())

    def bad(kind: str, what: object = "") -> Look:
        return Look(kind, str(what), (), 0, 0, digest)

    if name.startswith("._") or content.startswith(_APPLE_DOUBLE):
        return bad("AppleDouble")
    if not content:
        return bad("empty")
    try:
        height, width, _ = decode(content).shape
    except ImageDecodeError as error:
        if str(error) == NO_IMAGE:
            return bad("damaged" if content.startswith(_MAGIC) else "no image")
        return bad("truncated" if "truncated" in str(error).lower() else "damaged", error)
    return Look("", "", tuple(_notes(name, content)), width, height, digest)


def _notes(name: str, content: bytes) -> Iterator[str]:
    """What its header tells; nothing of an image that only other decoders than PIL read."""
    with suppress(Exception), Image.open(BytesIO(content)) as image:
        if image.mode == "CMYK":
            yield "CMYK"
        if _orientation(image) not in (0, 1):
            yield "turned by EXIF"
        usual = _NAMED.get(image.format or "", ())
        if name.lower().endswith(SUFFIXES) and not name.lower().endswith(usual):
            yield "named otherwise"


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF is not read by loaders: whatever is wrong with it does not matter
        return 1
