"""Shrink or decode images once, so that every later read is faster."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from PIL import Image

from imagenet_fast.data.decode import decode, store_pixels
from imagenet_fast.data.image_source import ImageDecodeError
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings
from imagenet_fast.data.resize import shrunk as loaders_shrunk

SHRUNK_QUALITY = 95
"""JPEG quality of shrunk images, unless told otherwise."""
_LONGEST_EXIF = 65_533  # bytes that fit in a JPEG


class Undecodable(Exception):
    """An error for an image that cannot be decoded; the message says what is wrong."""


def shrunk(content: bytes, side: int, quality: int) -> bytes:
    """Return ``content`` as a JPEG with the short side ``side``, or unchanged if its short side is not longer.

    The pixels are those that the loaders see: as stored, without the rotation that EXIF asks for, and RGB, except that
    grey stays grey. EXIF is kept if it fits in a JPEG, so programs that apply its orientation still do. A colour
    profile is kept too, unless the colours were converted.

    Args:
        content: The encoded image.
        side: The short side in pixels.
        quality: The quality of the JPEG.

    Raises:
        Undecodable: The image cannot be decoded.
    """
    try:
        with Image.open(BytesIO(content)) as image:
            width, height = image.size
            if min(width, height) <= side:
                return content
            pixels = image if image.mode in ("L", "RGB") else image.convert("RGB")
            profile = image.info.get("icc_profile") if pixels is image else None
            exif = image.info.get("exif", b"")
            scale = side / min(width, height)
            small = pixels.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
            written = BytesIO()
            exif = exif if len(exif) <= _LONGEST_EXIF else b""
            small.save(written, "JPEG", quality=quality, icc_profile=profile, exif=exif)
            return written.getvalue()
    # Pillow's decoders raise many types, among them EOFError, SyntaxError and struct.error
    except Exception as error:
        raise Undecodable(str(error)) from None


def stored(file: SourceFile, settings: Settings) -> tuple[bytes, bool]:
    """Return the bytes to keep of an image, and whether it could not be decoded, and so is kept unchanged."""
    content = file.read()
    if settings.format == "pixels":
        try:
            return store_pixels(loaders_shrunk(decode(content), settings.resize or 0)), False
        except ImageDecodeError:
            return content, True
    if settings.resize is None or settings.quality is None:
        return content, False
    try:
        return shrunk(content, settings.resize, settings.quality), False
    except Undecodable:
        return content, True


def shrinking_ratio(sample: Iterable[SourceFile], settings: Settings) -> float:
    """Return the bytes kept of these images divided by their bytes in the source; 1 if these are 0."""
    before = after = 0
    for file in sample:
        before += file.size
        after += len(stored(file, settings)[0])
    return after / before if before else 1.0
