"""``imagenet-fast data fetch``: a data set into its place, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from imagenet_fast.data.cifar10 import IMAGES, fetch_cifar10
from imagenet_fast.data.digits import make_digits
from imagenet_fast.data.format_detection import check_folders
from imagenet_fast.data.paths import cache_dir
from imagenet_fast.errors import UserError


def fetch_dataset(name: str, out: Path | None, archive: Path | None) -> Path:
    """Fetch ``name`` into ``out`` or the cache directory, unless it is already there. Returns where it lies.

    Raises UserError for an unknown name, and where something else lies in its place.
    """
    place = out or cache_dir() / name
    match name:
        case "digits" | "cifar10" if place.exists():
            check_folders(place)
        case "digits":
            make_digits(place)
        case "cifar10":
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("cifar10", total=IMAGES)
                fetch_cifar10(place, archive, lambda phase, done: bar.update(task, description=phase, completed=done))
        case _:
            raise UserError(f"there is no data set '{name}' to fetch; there are cifar10 and digits")
    return place
