"""Photos of an ImageNet photo's usual size, where there is no ImageNet at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

_WIDTH, _HEIGHT = 500, 375
_WIDEST = 560
"""Of what is cut out of a photo 640 wide."""

_QUALITIES = (90, 96)


def make_photos(root: Path, count: int) -> str:
    """``count`` JPEGs to train on and one to validate, in one class; returns of what they are made.

    They are parts of the two photos that scikit-learn carries (china.jpg and flower.jpg, 640x427), in turn: 4:3, 400 to
    560 wide, from anywhere, half of them mirrored, resized to 500x375 by Lanczos and saved in a quality from 90 to 96.
    Without scikit-learn it is noise whose amplitude falls with its frequency, as in photographs, so that a decoder has
    about as much to do.
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
