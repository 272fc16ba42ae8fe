"""Which files are images and which folders are classes: one rule for whatever looks through folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".avif", ".ppm", ".pgm",
)  # fmt: skip
"""Of images: torchvision's, and what loaders read beside these. Upper and lower case are the same."""

_UNREAD = (
    ".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".svg", ".psd", ".tga", ".ico", ".exr", ".hdr", ".dng",
    ".cr2", ".nef", ".arw", ".raw",
)  # fmt: skip
"""Of files that a person takes for images, and that are passed over."""

_SYSTEM = frozenset(
    (
        "@eadir", "@recycle", "@recently-snapshot", "@tmp", "#recycle", "#snapshot", "__macosx", "__pycache__",
        "$recycle.bin", "system volume information", "lost+found",
    )
)  # fmt: skip
"""Folders that systems leave beside those of users, in lower case."""


def is_image_name(name: str) -> bool:
    """Whether a file called so is an image. An AppleDouble file, which macOS leaves beside others, is none."""
    return name.lower().endswith(SUFFIXES) and not name.startswith("._")


def is_class_name(name: str) -> bool:
    """Whether a folder called so is a class: hidden folders and those of systems are not."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


@dataclass(frozen=True)
class FolderContents:
    """What lies in one folder, each list sorted."""

    images: list[str]
    folders: list[str]
    """Folders that may hold images, and links to such."""
    hidden: list[str]
    """Hidden folders, and those of systems."""
    others: list[str]
    """All other files."""

    @property
    def entries(self) -> int:
        """How many there are of all sorts."""
        return len(self.images) + len(self.folders) + len(self.hidden) + len(self.others)

    @property
    def unread(self) -> list[str]:
        """Those of the others that a person takes for images."""
        return [name for name in self.others if name.lower().endswith(_UNREAD) and not name.startswith("._")]


def look_into(folder: Path) -> FolderContents:
    """Sort what is in ``folder`` by the rule. No file is asked for more than its name and type. Raises OSError."""
    images: list[str] = []
    folders: list[str] = []
    hidden: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            named_so = is_image_name(entry.name)
            # A link is followed only where its name does not tell: a million of them would take long.
            if entry.is_dir(follow_symlinks=not named_so):
                (folders if is_class_name(entry.name) else hidden).append(entry.name)
            else:
                (images if named_so else others).append(entry.name)
    return FolderContents(sorted(images), sorted(folders), sorted(hidden), sorted(others))


def images_below(folder: Path, within: str = "") -> Iterator[str]:
    """Images in ``folder`` and in folders inside it, by their paths there, each begun with ``within``. Links inside it
    are not followed, nor are hidden folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_class_name(name))
        inside = os.path.relpath(place, folder)
        start = os.path.join(within, "" if inside == "." else inside)  # noqa: PTH118  (pathlib would change odd names)
        yield from (os.path.join(start, name) for name in sorted(files) if is_image_name(name))  # noqa: PTH118


def shown(name: str) -> str:
    """A name as text that can be printed, whatever its bytes are."""
    return os.fsencode(name).decode(errors="backslashreplace")
