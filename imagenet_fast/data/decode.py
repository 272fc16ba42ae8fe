"""Decode images to the pixels of PIL's ``convert("RGB")``, with OpenCV where the result is the same: it is faster."""

from __future__ import annotations

import re
import zlib
from io import BytesIO
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from imagenet_fast.data.image_source import ImageDecodeError

Pixels = NDArray[np.uint8]
"""Decoded image, uint8 [height, width, 3], red first."""

_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

PIL_REFUSES = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)

_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_PNG = b"\x89PNG\r\n\x1a\n"
_BMP = b"BM"
PIXELS = b"P6\n"
"""How an image begins that ``store_pixels`` wrote."""
_PIXELS = re.compile(PIXELS + rb"(\d+) (\d+)\n255\n")
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
"""Markers of the JPEG segment that holds the size and the number of colour components."""


NO_IMAGE = "it is no image"
"""Reason reported for a file that no decoder recognises."""


class EncodedImage(NamedTuple):
    """An encoded image with its size in pixels."""

    encoded: bytes
    height: int
    width: int


def decode(encoded: bytes) -> Pixels:
    """Decode an image to RGB pixels as stored, without the rotation that EXIF asks for.

    Raises:
        ImageDecodeError: If the bytes are no image, or not a whole one.
    """
    if (stored := stored_pixels(encoded)) is not None:
        return stored
    if _alike(encoded):
        try:
            pixels = cv2.imdecode(np.frombuffer(encoded, dtype=np.uint8), _AS_STORED)
        except cv2.error:  # the image may be too large for OpenCV
            pixels = None
        if pixels is not None:
            return pixels  # type: ignore[no-any-return]
    return _decode_slowly(encoded)


def store_pixels(pixels: Pixels) -> bytes:
    """Return pixels as a binary PPM, whose values ``decode`` takes as they lie in memory."""
    return b"P6\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


def stored_pixels(encoded: bytes | memoryview) -> Pixels | None:
    """Return the pixels of a whole PPM, read-only, without a copy; None for all else."""
    header = _PIXELS.match(encoded)
    if header is None:
        return None
    width, height = map(int, header.groups())
    values = np.frombuffer(encoded, dtype=np.uint8, offset=header.end())
    return values.reshape(height, width, 3) if len(values) == 3 * height * width > 0 else None


def _decode_slowly(encoded: bytes) -> Pixels:
    """Decode with PIL; an image is bad only if PIL fails. Raise ImageDecodeError then."""
    if not encoded:
        raise ImageDecodeError("it is empty")
    try:
        with Image.open(BytesIO(encoded)) as image:
            return np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ImageDecodeError(NO_IMAGE) from None
    except Exception as error:  # decoders raise many types, such as SyntaxError and struct.error
        raise ImageDecodeError(str(error) or type(error).__name__) from None


def to_common_format(encoded: bytes) -> EncodedImage:
    """Return the image in a format that every decoder decodes to the same pixels.

    The bytes are returned as they are if possible, and else decoded and encoded again. Damage between an intact start
    and an intact end is not detected here, only when the image is decoded.

    Raises:
        ImageDecodeError: If the image is not whole and cannot be decoded.
    """
    size = _size_if_whole(encoded) if _alike(encoded) else None
    if size is not None:
        return EncodedImage(encoded, *size)
    return encode(decode(encoded))


def encode(pixels: Pixels) -> EncodedImage:
    """Encode pixels losslessly as an uncompressed BMP: no time is spent on making it small."""
    bitmap = cv2.imencode(".bmp", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1]
    return EncodedImage(bitmap.tobytes(), pixels.shape[0], pixels.shape[1])


def _alike(encoded: bytes) -> bool:
    """Return whether every decoder that can decode these bytes gets the same pixels as PIL.

    OpenCV differs from PIL for JPEGs with four colour components, and for 16-bit grey PNGs, whose values PIL clips at
    255. For rare formats (TIFF, AVIF, ...) it differs if there is transparency, or more than 8 bits.
    """
    if encoded.startswith(_PNG):
        bits, kind = encoded[24:26].ljust(2, b"\0")
        return bits <= 8 or kind not in (0, 4)
    if encoded.startswith(_JPEG):
        frame = _frame(encoded)
        return frame is None or frame.colours != 4
    return encoded.startswith(_BMP) or _is_webp(encoded)


def _is_webp(encoded: bytes) -> bool:
    return encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP"


def _size_if_whole(encoded: bytes) -> tuple[int, int] | None:
    """Return (height, width) of an image with an intact start and end; None for a rare format or a broken image."""
    if encoded.startswith(_JPEG):
        frame = _frame(encoded) if encoded.endswith(_JPEG_END) else None
        return (frame.height, frame.width) if frame is not None and frame.height else None
    if encoded.startswith(_PNG):
        width, height = encoded[16:20], encoded[20:24]
        return (int.from_bytes(height), int.from_bytes(width)) if _sums_are_right(encoded) else None
    if encoded.startswith(_BMP):
        return _size_by_pil(encoded) if int.from_bytes(encoded[2:6], "little") == len(encoded) else None
    if _is_webp(encoded):
        return _size_by_pil(encoded) if int.from_bytes(encoded[4:8], "little") + 8 == len(encoded) else None
    return None


def _sums_are_right(png: bytes) -> bool:
    """Return whether every chunk of a PNG has the right checksum: some decoders reject a wrong one."""
    at = len(_PNG)
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4])
        if zlib.crc32(memoryview(png)[at + 4 : end]) != int.from_bytes(png[end : end + 4]):
            return False
        if png[at + 4 : at + 8] == b"IEND":
            return end + 4 == len(png)
        at = end + 4
    return False


def _size_by_pil(encoded: bytes) -> tuple[int, int] | None:
    try:
        with Image.open(BytesIO(encoded)) as image:
            return image.height, image.width
    except Exception:  # many types, as above
        return None


class _Frame(NamedTuple):
    height: int
    width: int
    colours: int


def _frame(jpeg: bytes) -> _Frame | None:
    """Find the size and colour components in a JPEG, by skipping the segments before them; None if not found."""
    at = 2
    while jpeg.startswith(_JPEG) and at + 9 < len(jpeg) and jpeg[at] == 0xFF:
        if jpeg[at + 1] in _FRAMES:
            height, width = jpeg[at + 5 : at + 7], jpeg[at + 7 : at + 9]
            return _Frame(int.from_bytes(height), int.from_bytes(width), jpeg[at + 9])
        at += 1 if jpeg[at + 1] == 0xFF else 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return None
