"""Make photos of ImageNet's usual size, for use without ImageNet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

_WIDTH, _HEIGHT = 500, 375
_WIDEST = 560
"""Largest width in pixels of a part cut from a photo, which is 640 wide."""

_QUALITIES = (90, 96)


def make_photos(root: Path, count: int) -> str:
    """Write ``count`` JPEGs to train on and one to validate, in one class, and return what they are made of.

    They are parts of scikit-learn's two photos (china.jpg and flower.jpg, 640x427), in turn. A part is 4:3, 400 to 560
    wide and from a random position; half of the parts are mirrored. It is resized to 500x375 with Lanczos and saved
    with a quality from 90 to 96.

    Without scikit-learn they are noise whose amplitude falls with its frequency, as in photographs. So a decoder has
    about as much work.
    """
    random = np.random.default_rng(0)
    theirs = _theirs()
    made = _cut(theirs, random) if theirs else _noise(random)
    for index in range(count + 1):
        folder = root / ("train" if index < count else "val") / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        quality = int(random.integers(_QUALITIES[0], _QUALITIES[1] + 1))
        next(made).save(folder / f"{index:05}.jpg", quality=quality)
    return "parts of scikit-learn's two photos" if theirs else "noise, for scikit-learn's photos are not installed"


def _theirs() -> list[Image.Image]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        return []
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def _cut(photos: list[Image.Image], random: np.random.Generator) -> Iterator[Image.Image]:
    while True:
        for photo in photos:
            width = int(random.integers(400, _WIDEST + 1))
            height = width * _HEIGHT // _WIDTH
            left, top = random.integers(0, (photo.width - width + 1, photo.height - height + 1)).tolist()
            part = photo.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS, (left, top, left + width, top + height))
            yield part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.integers(2) else part


def _noise(random: np.random.Generator) -> Iterator[Image.Image]:
    frequency = np.hypot(np.fft.fftfreq(_HEIGHT)[:, None], np.fft.rfftfreq(_WIDTH)[None])
    frequency[0, 0] = 1.0
    while True:
        spectrum = np.fft.rfft2(random.standard_normal((3, _HEIGHT, _WIDTH))) / frequency
        pixels = np.fft.irfft2(spectrum, (_HEIGHT, _WIDTH))
        pixels *= 50 / pixels.std()
        yield Image.fromarray((pixels.transpose(1, 2, 0) + 128).clip(0, 255).astype(np.uint8))
