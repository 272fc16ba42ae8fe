"""Decode images to the pixels of PIL's ``convert("RGB")``, resize and crop them.

OpenCV decodes where the result is the same: it is faster.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from io import BytesIO
from typing import BinaryIO, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from imagenet_fast.data.order import Augmentation, Resolution

Pixels = NDArray[np.uint8]
"""Decoded image, uint8 [height, width, 3], red first."""

_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
_KINDS = {_JPEG: "jpg", _PNG[:4]: "png", b"BM": "bmp", b"RIFF": "webp", b"P6\n": "ppm"}
_FRAMES = (0xC0, 0xC1, 0xC2)
"""Markers of the JPEG segment with the size and the colour components: baseline or progressive."""
_OTHERS = {0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
"""Markers of tables, applications' data and comments."""

_SEGMENT = struct.Struct(">BBHBHHB")
"""A marker's two bytes, the length from there on, and what a size's segment holds: bits, height, width, colours."""

_PIXELS = re.compile(rb"P6\n(\d+) (\d+)\n255\n")
_HEADER = 64  # bytes; more than the header of stored pixels has

NO_IMAGE = "it is no image"
"""Reason reported for a file that no decoder recognises."""

NO_MEMORY = re.compile(r"MemoryError|out of memory|insufficient memory|allocate memory|bad_alloc", re.IGNORECASE)
"""A pattern in the ``repr`` of errors by which Python, decoders, torch and the system say that memory is short."""


class ImageDecodeError(Exception):
    """Error for bytes that are no image, or not a whole one. The message gives the reason in a few words."""


class EncodedImage(NamedTuple):
    """An encoded image with its size in pixels."""

    encoded: bytes
    height: int
    width: int


def decode(encoded: bytes) -> Pixels:
    """Decode an image to RGB pixels as stored, without the rotation that EXIF asks for.

    Raises:
        ImageDecodeError: If the bytes are no image, or not a whole one.
        MemoryError: If there is too little memory to tell.
    """
    height, width = stored_size(encoded, len(encoded))
    if height:
        values = np.frombuffer(encoded, dtype=np.uint8, offset=len(encoded) - 3 * height * width)
        return values.reshape(height, width, 3)  # as they lie in memory, read-only
    if _common_size(encoded)[0]:
        try:
            pixels = cv2.imdecode(np.frombuffer(encoded, dtype=np.uint8), _AS_STORED)
        except cv2.error:  # the image may be too large for OpenCV
            pixels = None
        if pixels is not None:
            return pixels  # type: ignore[no-any-return]
    return _decode_slowly(encoded)


def kind_of(encoded: bytes) -> str:
    """Return the usual suffix of the image format that these bytes begin as, such as "jpg"; "" if unknown."""
    return next((kind for magic, kind in _KINDS.items() if encoded.startswith(magic)), "")


def store_pixels(pixels: Pixels) -> bytes:
    """Return pixels as a binary PPM, whose values ``decode`` takes as they lie in memory."""
    return b"P6\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


def stored_size(header: bytes, length: int) -> tuple[int, int]:
    """Return the height and width of stored pixels of ``length`` bytes that begin with ``header``; 0 of others."""
    if (found := _PIXELS.match(header)) is None:
        return 0, 0
    width, height = map(int, found.groups())
    return (height, width) if found.end() + 3 * height * width == length and height and width else (0, 0)


def size_by_header(file: BinaryIO, begin: int, end: int) -> tuple[int, int, bool]:
    """Return the height and width of an image between two offsets of a file, and whether its pixels are stored.

    They are 0 unless these are stored, or it is a JPEG of a kind that all decoders know.
    """
    file.seek(begin)
    head = file.read(min(_HEADER, end - begin))
    if head.startswith(_JPEG):
        return *_jpeg_size(file, begin, end), False
    height, width = stored_size(head, end - begin)
    return height, width, height > 0


def _decode_slowly(encoded: bytes) -> Pixels:
    """Decode with PIL; an image is bad only if PIL fails where memory is not short. Raise ImageDecodeError then."""
    if not encoded:
        raise ImageDecodeError("it is empty")
    taken = 1024 * min(len(encoded), 1 << 20)  # bytes that decoding may take, as long as the size is not known
    try:
        with Image.open(BytesIO(encoded)) as image:
            taken = 12 * image.width * image.height
            return np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ImageDecodeError(NO_IMAGE) from None
    except Exception as error:  # decoders raise many types, such as SyntaxError and struct.error
        if NO_MEMORY.search(repr(error)):
            raise MemoryError from None
        np.empty(taken, np.uint8)  # some call an image broken where memory is short; this raises MemoryError then
        raise ImageDecodeError(str(error) or type(error).__name__) from None


def to_common_format(encoded: bytes) -> EncodedImage:
    """Return the image in a format that every decoder decodes to the same pixels.

    A common image is returned as it is; others are decoded and encoded again. Damage amid an image is not detected
    here, only when it is decoded.

    Raises:
        ImageDecodeError: If the image is not whole and cannot be decoded.
    """
    height, width = _common_size(encoded)
    return EncodedImage(encoded, height, width) if height else encode(decode(encoded))


def encode(pixels: Pixels) -> EncodedImage:
    """Encode pixels losslessly as an uncompressed BMP: no time is spent on making it small."""
    bitmap = cv2.imencode(".bmp", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1]
    return EncodedImage(bitmap.tobytes(), pixels.shape[0], pixels.shape[1])


def _common_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width of an image that every decoder decodes to PIL's pixels; 0 of all others.

    These are JPEGs and PNGs of the usual kinds with an end: of formats that are rare, decoders differ in colours, in
    transparency, in more than 8 bits, and in what they take for damage.
    """
    if encoded.startswith(_JPEG) and encoded.endswith(_JPEG_END):
        return _jpeg_size(BytesIO(encoded), 0, len(encoded))
    return _png_size(encoded) if encoded.startswith(_PNG) and encoded.endswith(_PNG_END) else (0, 0)


def _png_size(png: bytes) -> tuple[int, int]:
    """Return height and width of a PNG; 0 of an animation, and of grey in 16 bits, whose values PIL clips at 255."""
    width, height, bits, colours = struct.unpack_from(">IIBB", png.ljust(26, b"\0"), 16)
    moves = b"acTL" in png[: png.find(b"IDAT")]
    return (0, 0) if moves or (bits > 8 and colours in (0, 4)) else (height, width)


def _jpeg_size(file: BinaryIO, begin: int, end: int) -> tuple[int, int]:
    """Return height and width of a JPEG of 8 bits in one or three colours; 0 of others."""
    at = begin + len(_JPEG)
    while at + _SEGMENT.size <= end:
        file.seek(at)
        first, kind, length, bits, height, width, colours = _SEGMENT.unpack(file.read(_SEGMENT.size))
        at += 2 + length
        if kind in _FRAMES and first == 0xFF and bits == 8 and colours in (1, 3) and height and width:
            return height, width
        if kind not in _OTHERS or first != 0xFF:
            break
    return 0, 0


def shrunk(image: Pixels, shorter: int) -> Pixels:
    """Return the image with a shorter side of at most ``shorter`` pixels; unchanged if that is 0."""
    height, width = image.shape[:2]
    return resized(image, *scaled_size(height, width, shorter)) if 0 < shorter < min(height, width) else image


def scaled_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side scaled to ``shorter``, rounded as in torchvision."""
    shortest = min(height, width)
    return shorter * height // shortest, shorter * width // shortest


def resized(image: Pixels, height: int, width: int, into: Pixels | None = None) -> Pixels:
    """Resize with PIL's bilinear filter, which widens when it shrinks; within one grey level of PIL's result.

    It uses torch's filter for bytes: that takes a fifth of PIL's time, and a third of OpenCV's mean over areas. If no
    side shrinks, OpenCV has the same filter; for a small image it takes less time than just calling torch.

    The result is written to ``into``, uint8 [height, width, 3]. Without it, it is new memory, or the image itself if it
    has this size already.
    """
    if image.shape[:2] == (height, width):
        if into is None:
            return image
        into[:] = image
        return into
    if into is None:
        into = np.empty((height, width, 3), dtype=np.uint8)
    if image.shape[0] <= height and image.shape[1] <= width:
        cv2.resize(image, (width, height), dst=into, interpolation=cv2.INTER_LINEAR)
        return into
    import torch  # not needed to decode, as `data verify` does

    own = image if image.flags.writeable else image.copy()  # torch warns about a read-only array
    source, target = (torch.from_numpy(pixels[None]).permute(0, 3, 1, 2) for pixels in (own, into))
    # `interpolate` calls this too but returns channels first; converting that back takes longer than the filter.
    torch._C._nn._upsample_bilinear2d_aa(source, [height, width], False, out=target)  # type: ignore[call-arg]
    return into


def random_crop(
    image: Pixels, resolution: Resolution, augmentation: Augmentation, numbers: Sequence[float], into: Pixels
) -> None:
    """Write a random crop of ``image``, not flipped, to ``into``, uint8 [size, size, 3].

    The ``numbers`` are those that ``augmentation`` drew for this image; one that is padded is first resized.
    """
    (size, shorter), padding = resolution, augmentation.padding
    if padding is None:
        top, left, height, width = augmentation.window(image.shape[0], image.shape[1], numbers)
        resized(image[top : top + height, left : left + width], size, size, into=into)
        return
    image = resized(image, *scaled_size(image.shape[0], image.shape[1], shorter))
    drawn = zip(image.shape, numbers[:2], strict=False)
    top, left = (padding + int(augmentation.corner(side, size, number)) for side, number in drawn)
    around = (padding,) * 4  # pixels of its mirror image, without the outermost ones again
    into[:] = cv2.copyMakeBorder(image, *around, cv2.BORDER_REFLECT_101)[top : top + size, left : left + size]


def central_crop(image: Pixels, resolution: Resolution) -> Pixels:
    """Resize an image to the shorter side ``resolution.shorter`` and return its centre, [size, size, 3]."""
    size, shorter = resolution
    image = resized(image, *scaled_size(image.shape[0], image.shape[1], shorter))
    top, left = (round((side - size) / 2) for side in image.shape[:2])  # rounded as in torchvision
    return image[top : top + size, left : left + size]
