"""Pixels are PIL's, whoever decodes and resizes them, and crops torchvision's."""

from __future__ import annotations

import io
import struct
import threading
from contextlib import suppress
from unittest.mock import Mock

import cv2
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from imagenet_fast.data import pixels as decoding
from imagenet_fast.data.order import Resolution
from imagenet_fast.data.pixels import ImageDecodeError, central_crop, decode, resized, to_common_format
from tests.data.encoded import BAD, IMAGES, JPEG


def test_every_kind_of_image_has_pils_pixels_also_where_it_is_encoded_anew():
    seldom = ("cmyk", "cmyk behind a long segment", "with bytes behind", "deep grey", "without its end")
    seldom_kinds = ("bitmap", "gif", "tiff", "avif", "webp", "pixmap", "moving")
    for name, content in IMAGES.items():
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB"))
        given = to_common_format(content)
        assert np.array_equal(decode(content), pixels), name
        assert np.array_equal(decode(given.encoded), pixels), name
        assert (given.height, given.width) == pixels.shape[:2]
        common = name not in seldom and not any(kind in name for kind in seldom_kinds)
        assert (given.encoded == content) == common, name


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_whole_image_is_refused_with_a_reason(name: str):
    content = BAD[name]
    with pytest.raises(ImageDecodeError, match=r"it is empty|it is no image|truncated|broken"):
        decode(content)
    with suppress(ImageDecodeError):
        to_common_format(content)
        assert name == "a png with a changed bit", "what is broken at an end is given to no other decoder"


def test_a_header_tells_the_size_of_stored_pixels_and_of_jpegs_that_all_decoders_read_alike():
    """Whatever lies around them in a file; of metadata nothing is read."""
    for name, content in IMAGES.items():
        file = Mock(wraps=io.BytesIO(b"?" + content + JPEG))
        height, width, stored = decoding.size_by_header(file, 1, 1 + len(content))
        known = stored or (content.startswith(JPEG[:2]) and "cmyk" not in name)
        assert (height, width) == (decode(content).shape[:2] if known else (0, 0)), name
        assert stored == (name == "portable pixmap")
        assert all(length <= 64 for (length,), _ in file.read.call_args_list)


def test_whatever_a_decoder_raises_is_a_bad_image_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    """Pillow's decoders raise of many kinds; where memory is short, some of them call an image broken."""
    for error in (struct.error("unpack"), EOFError(), ZeroDivisionError("by zero"), KeyError(3)):
        monkeypatch.setattr(Image, "open", Mock(side_effect=error))
        for read in (decode, to_common_format):
            with pytest.raises(ImageDecodeError, match=r"\S"):
                read(IMAGES["gif"])
    monkeypatch.setattr(cv2, "imdecode", Mock(side_effect=cv2.error("(-4:Insufficient memory) Failed to allocate")))
    for error in (MemoryError(), OSError("Pixel allocation failed: Out of memory"), OSError("broken data stream")):
        monkeypatch.setattr(Image, "open", Mock(side_effect=error))
        if "broken" in str(error):
            monkeypatch.setattr(np, "empty", Mock(side_effect=MemoryError()))
        for kind in ("jpeg", "gif"):
            with pytest.raises(MemoryError):
                decode(IMAGES[kind])


def test_a_common_image_is_not_left_to_pil(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "_decode_slowly", None)
    for name in ("jpeg", "progressive", "grey", "turned", "png", "palette", "transparent"):
        decode(IMAGES[name])


def test_opencv_is_given_whole_jpegs_and_plain_pngs_alone(monkeypatch: pytest.MonkeyPatch):
    """An animation in grey would end the process."""
    decoder = Mock(side_effect=cv2.imdecode)
    monkeypatch.setattr(cv2, "imdecode", decoder)
    for content in (IMAGES | BAD).values():
        with suppress(ImageDecodeError):
            decode(content)
    given = [call.args[0].tobytes() for call in decoder.call_args_list]
    assert len(given) > 15
    for content in given:
        assert content.endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))
        assert b"acTL" not in content


def test_an_image_of_which_a_byte_is_wrong_is_decoded_or_refused():
    for changed in range(2, len(JPEG), 97):
        damaged = JPEG[:changed] + bytes([JPEG[changed] ^ 0xFF]) + JPEG[changed + 1 :]
        with suppress(ImageDecodeError):
            assert decode(damaged).shape[2] == 3


def blobs(height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(height).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


SIZES = [(375, 500), (500, 333), (32, 32), (31, 97), (224, 224), (256, 400), (1, 1), (1, 90), (700, 3)]


@pytest.mark.parametrize("to", [(224, 224), (48, 48), (33, 61)])
def test_resize_agrees_with_pil(to: tuple[int, int]):
    for size in SIZES:
        image = blobs(*size)
        theirs = np.asarray(image.resize(to[::-1], Image.Resampling.BILINEAR)).astype(int)
        ours = resized(np.array(image), *to)
        assert ours.dtype == np.uint8
        assert np.abs(ours - theirs).max() <= 1, size


@pytest.mark.parametrize(("shorter", "side"), [(256, 224), (48, 48), (57, 32)])
def test_the_middle_is_torchvisions(shorter: int, side: int):
    for size in SIZES:
        image = blobs(*size)
        theirs = np.asarray(v2.Compose([v2.Resize(shorter), v2.CenterCrop(side)])(image)).astype(int)
        ours = central_crop(np.array(image), Resolution(side, shorter))
        assert ours.shape == (side, side, 3)
        assert np.abs(ours - theirs).max() <= 1, size


def test_a_thread_that_resizes_starts_no_others():
    """Each of the loader's threads would have a team of its own."""
    image = np.array(blobs(375, 500))
    running = []

    def resize_again_and_again() -> None:
        before = psutil.Process().num_threads()
        for _ in range(20):
            resized(image, 224, 224)
        running.append(psutil.Process().num_threads() - before)

    torch.set_num_threads(4)
    try:
        thread = threading.Thread(target=resize_again_and_again)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(1)
    assert running[0] <= 0
