"""Images made smaller once, so that they are read and decoded faster ever after."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from PIL import Image

from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings

_LONGEST_EXIF = 65_533  # bytes that a JPEG has room for


class Undecodable(Exception):
    """What is wrong with an image."""


def shrunk(content: bytes, side: int, quality: int) -> bytes:
    """A JPEG of the image with the short side ``side``; ``content`` itself where that is no longer already.

    Pixels are those that the loaders see: as stored, without the rotation that EXIF asks for, and RGB, but grey stays
    grey. EXIF stays with it, so whoever heeds its orientation goes on to; a colour profile does, too, unless it was of
    other colours. Raises Undecodable.
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
    # Pillow's decoders raise of many kinds, EOFError, SyntaxError and struct.error among them
    except Exception as error:
        raise Undecodable(str(error)) from None
    written = BytesIO()
    small.save(written, "JPEG", quality=quality, icc_profile=profile, exif=exif if len(exif) <= _LONGEST_EXIF else b"")
    return written.getvalue()


def stored(file: SourceFile, settings: Settings) -> tuple[bytes, bool]:
    """What is kept of an image, and whether it cannot be decoded for shrinking: it is then kept as it is."""
    content = file.read()
    if settings.resize is None or settings.quality is None:
        return content, False
    try:
        return shrunk(content, settings.resize, settings.quality), False
    except Undecodable:
        return content, True


def shrinking_ratio(sample: Iterable[SourceFile], settings: Settings) -> float:
    """The bytes kept of these images to those they have; 1 where they have none."""
    before = after = 0
    for file in sample:
        before += file.size
        after += len(stored(file, settings)[0])
    return after / before if before else 1.0
