"""Check one file that should be an image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple

from PIL import Image

from imagenet_fast.data.decode import NO_IMAGE, decode
from imagenet_fast.data.image_names import SUFFIXES
from imagenet_fast.data.image_source import ImageDecodeError

KINDS = ("empty", "AppleDouble", "no image", "truncated", "damaged", "unreadable")
"""Kinds of files that loaders cannot read."""

NOTES = ("CMYK", "above 8 bits", "turned by EXIF", "named otherwise")
"""Kinds of images that need care, but that loaders accept."""

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
"""Usual suffixes of each format."""

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_ORIENTATION = 0x0112


class Look(NamedTuple):
    """The result of checking one file."""

    kind: str
    """One of ``KINDS``, or empty for a good image."""
    what: str
    """The decoder's error message."""
    notes: tuple[str, ...]
    width: int
    height: int
    digest: int
    """64-bit hash of the content."""


def examine(name: str, content: bytes) -> Look:
    """Decode all of the file ``name`` as loaders do, so that both agree on what is bad.

    The format is compared with the suffix only if ``name`` has an image suffix.
    """
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
    """Yield what the header shows; nothing for an image that PIL cannot read but other decoders can."""
    with suppress(Exception), Image.open(BytesIO(content)) as image:
        if image.mode == "CMYK":
            yield "CMYK"
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # loaders clip their values at 255, as PIL does
            yield "above 8 bits"
        if _orientation(image) not in (0, 1):
            yield "turned by EXIF"
        usual = _NAMED.get(image.format or "", ())
        if name.lower().endswith(SUFFIXES) and not name.lower().endswith(usual):
            yield "named otherwise"


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # loaders do not read EXIF, so errors in it do not matter
        return 1
