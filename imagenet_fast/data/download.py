"""Fetch a data set for ``imagenet-fast data fetch``, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from imagenet_fast.data.cifar10 import IMAGES, fetch_cifar10
from imagenet_fast.data.digits import make_digits
from imagenet_fast.data.format_detection import check_folders
from imagenet_fast.data.paths import cache_dir
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.errors import UserError


def fetch_dataset(name: str, out: Path | None, archive: Path | None) -> Path:
    """Fetch the data set ``name``, unless it is already there, and return its directory.

    Args:
        name: "digits" or "cifar10".
        out: Directory of the data set; None: one in the cache directory.
        archive: CIFAR-10 archive on disk; None: download it.

    Raises:
        UserError: If the name is unknown, something else lies in the data set's place, or it cannot be fetched.
    """
    place = out or cache_dir() / name
    match name:
        case "digits" | "cifar10" if place.exists():
            check_folders(place)
        case "digits":
            make_digits(place)
        case "cifar10":
            with progress_bars("images") as bar:
                task = bar.add_task("cifar10", total=IMAGES)
                fetch_cifar10(place, archive, lambda phase, done: bar.update(task, description=phase, completed=done))
        case _:
            raise UserError(f"there is no data set '{name}' to fetch; there are cifar10 and digits")
    return place
