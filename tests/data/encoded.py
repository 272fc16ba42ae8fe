"""Encoded images of every kind that lies in real folders, and what is no image."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

_RANDOM = np.random.default_rng(1)
BLOBS = Image.fromarray(_RANDOM.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((120, 80), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _transparent() -> Image.Image:
    image = BLOBS.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(BLOBS.size))
    return image


def deep_png(channels: int) -> bytes:
    """In 16 bits, which PIL does not write in colour."""
    height, width = 20, 30
    pixels = _RANDOM.integers(0, 2**16, (height, width * channels)).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


JPEG = encoded(BLOBS, "JPEG", quality=95)
PNG = encoded(BLOBS, "PNG")
GREY = BLOBS.convert("L")

IMAGES = {
    "jpeg": JPEG,
    "coarse": encoded(BLOBS, "JPEG", quality=40, subsampling=2),
    "progressive": encoded(BLOBS, "JPEG", progressive=True, subsampling=2),
    "stored as RGB": encoded(BLOBS, "JPEG", keep_rgb=True),
    "grey": encoded(GREY, "JPEG"),
    "cmyk": encoded(BLOBS.convert("CMYK"), "JPEG", quality=95),
    "cmyk behind a long segment": encoded(BLOBS.convert("CMYK"), "JPEG", icc_profile=bytes(100_000)),
    "turned": encoded(BLOBS, "JPEG", exif=_turned()),
    "with bytes behind": JPEG + b"junk",
    "several": encoded(BLOBS, "MPO", save_all=True, append_images=[BLOBS.rotate(180)]),
    "png": PNG,
    "black and white": encoded(BLOBS.convert("1"), "PNG"),
    "palette": encoded(BLOBS.quantize(32), "PNG"),
    "transparent": encoded(_transparent(), "PNG"),
    "transparent grey": encoded(_transparent().convert("LA"), "PNG"),
    "a transparent colour": encoded(BLOBS, "PNG", transparency=(1, 2, 3)),
    "deep grey": deep_png(1),
    "deep colour": deep_png(3),
    "moving": encoded(_transparent(), "PNG", save_all=True, append_images=[_transparent().rotate(90)], duration=9),
    "moving grey": encoded(GREY, "PNG", save_all=True, append_images=[GREY.rotate(90)], duration=9),
    "without its end": PNG[:-12],
    "pixel": encoded(BLOBS.resize((1, 1)), "PNG"),
    "jpeg pixel": encoded(BLOBS.resize((1, 1)), "JPEG"),
    "strip": encoded(BLOBS.resize((300, 2)), "PNG"),
    "bitmap": encoded(BLOBS, "BMP"),
    "a deep bitmap": encoded(_transparent(), "BMP"),
    "webp": encoded(BLOBS, "WEBP"),
    "transparent webp": encoded(_transparent(), "WEBP"),
    "gif": encoded(BLOBS.quantize(32), "GIF"),
    "tiff": encoded(BLOBS, "TIFF"),
    "deep tiff": encoded(BLOBS.convert("I;16"), "TIFF"),
    "transparent tiff": encoded(_transparent(), "TIFF"),
    "turned tiff": encoded(BLOBS, "TIFF", exif=_turned()),
    "avif": encoded(BLOBS, "AVIF"),
    "portable pixmap": encoded(BLOBS, "PPM"),
}

BAD = {
    "empty": b"",
    "two bytes": b"\xff\xd8",
    "a header alone": JPEG[:3] + b"\xff" * 40,
    "half a jpeg": JPEG[: len(JPEG) // 2],
    "zeros from the middle on": JPEG[: len(JPEG) // 2] + bytes(len(JPEG) // 2),
    "a png's signature": PNG[:8],
    "half a png": PNG[: len(PNG) // 2],
    "a png with a changed bit": PNG[:-20] + bytes([PNG[-20] ^ 1]) + PNG[-19:],
    "text": b"404 not found " * 30,
    "a Mac's shadow of a file": b"\x00\x05\x16\x07" + bytes(500),
}
