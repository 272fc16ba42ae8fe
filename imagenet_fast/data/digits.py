"""Write 1797 real handwritten digits (scikit-learn's copy of the UCI set), for a demonstration in a minute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.errors import UserError

SIZE = 64
HELD_OUT = 5  # every fifth image of a class is for validation


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
                split = "val" if number % HELD_OUT == 0 else "train"
                image = grey.resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")
                image.save(folder / split / str(label) / f"{number:03}.jpg", quality=95)
