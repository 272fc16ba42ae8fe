"""Find the data set of a recipe on disk, and create the one that needs no download: 1797 real handwritten digits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.errors import UserError

_DIGIT_SIDE = 64
_DIGITS_HELD_OUT = 5  # every fifth image of a class is for validation


def cache_dir() -> Path:
    """Return ``$IMAGENET_FAST_CACHE``, or ``imagenet-fast`` in the user's cache directory.

    Raises:
        UserError: If neither it nor ``XDG_CACHE_HOME`` is set, and the user has no home directory.
    """
    if own := os.environ.get("IMAGENET_FAST_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagenet-fast"
    except RuntimeError:
        raise UserError(
            "data sets are kept in the home directory, and this user has no home directory; set IMAGENET_FAST_CACHE "
            "to a directory of yours, or give --data DIR"
        ) from None


def resolve_data_dir(dataset: Literal["imagenet", "cifar10", "digits"], given: Path | None) -> Path:
    """Return the directory to train from: ``given``, or the data set's own place in the cache directory.

    The digits are created there if they are missing. Raises UserError for other data sets, with how to get them.
    """
    if given is not None:
        return given
    place = cache_dir() / dataset
    if place.is_dir():
        return place
    if dataset == "imagenet":
        raise UserError(
            "this recipe trains on ImageNet; say where it lies with --data DIR (train/<class>/*, val/<class>/*)"
        )
    if dataset == "cifar10":
        raise UserError(
            f"CIFAR-10 is not in {place} yet; run `imagenet-fast data fetch cifar10` once, or give --data DIR"
        )
    make_digits(place)
    return place


def make_digits(place: Path) -> None:
    """Write the digits to ``place`` as 64 x 64 JPEGs in class folders: four fifths train, one fifth val.

    Raises:
        UserError: If scikit-learn is not installed, or ``place`` cannot be created.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "the digits come with scikit-learn, which is not installed; `pip install scikit-learn`, or give --data DIR"
        ) from None
    digits = load_digits()
    with atomic_directory(place) as folder:
        for label in range(10):
            for split in ("train", "val"):
                (folder / split / str(label)).mkdir(parents=True)
            for number, pixels in enumerate(digits.images[digits.target == label]):
                grey = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
                split = "val" if number % _DIGITS_HELD_OUT == 0 else "train"
                image = grey.resize((_DIGIT_SIDE, _DIGIT_SIDE), Image.Resampling.BICUBIC).convert("RGB")
                image.save(folder / split / str(label) / f"{number:03}.jpg", quality=95)
