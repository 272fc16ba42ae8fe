"""Shrink or decode images once, so that every later read is faster."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from PIL import Image

from imagenet_fast.data.pixels import ImageDecodeError, decode, store_pixels
from imagenet_fast.data.pixels import shrunk as loaders_shrunk
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings

SHRUNK_QUALITY = 95
"""JPEG quality of shrunk images, unless told otherwise."""
_LONGEST = 65_500  # pixels of a JPEG's side


def shrunk(content: bytes, side: int, quality: int) -> bytes:
    """Return ``content`` as a JPEG with the short side ``side``, without metadata.

    It is returned unchanged if its short side is not longer, or if the long one would be too long for a JPEG. The
    pixels are those that the loaders see: as stored, without the rotation that EXIF asks for. Grey stays grey.

    Args:
        content: The encoded image.
        side: The short side in pixels.
        quality: The quality of the JPEG.

    Raises:
        ImageDecodeError: The loaders cannot decode the image.
    """
    pixels = decode(content)
    height, width, _ = pixels.shape
    scale = side / min(width, height)
    size = round(width * scale), round(height * scale)
    if scale >= 1 or max(size) > _LONGEST:
        return content
    is_grey = bool((pixels == pixels[..., :1]).all())
    written = BytesIO()
    image = Image.fromarray(pixels[..., 0] if is_grey else pixels)
    image.resize(size, Image.Resampling.LANCZOS).save(written, "JPEG", quality=quality)
    return written.getvalue()


def stored(file: SourceFile, settings: Settings) -> tuple[bytes, bool]:
    """Return the bytes to keep of an image, and whether it could not be decoded, and so is kept unchanged."""
    content = file.read()
    try:
        if settings.format == "pixels":
            return store_pixels(loaders_shrunk(decode(content), settings.resize or 0)), False
        if settings.resize is not None and settings.quality is not None:
            return shrunk(content, settings.resize, settings.quality), False
    except ImageDecodeError:
        return content, True
    return content, False


def shrinking_ratio(sample: Iterable[SourceFile], settings: Settings) -> float:
    """Return the bytes kept of these images divided by their bytes in the source; 1 if these are 0."""
    before = after = 0
    for file in sample:
        before += file.size
        after += len(stored(file, settings)[0])
    return after / before if before else 1.0
