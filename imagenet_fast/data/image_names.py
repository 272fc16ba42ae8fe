"""Decide which files are images and which folders are classes: one rule for all code that lists folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imagenet_fast.errors import UserError

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".avif", ".ppm", ".pgm",
)  # fmt: skip
"""Suffixes of images, in upper or lower case: torchvision's, and others that the loaders read."""

_UNREAD = (
    ".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".svg", ".psd", ".tga", ".ico", ".exr", ".hdr", ".dng",
    ".cr2", ".nef", ".arw", ".raw",
)  # fmt: skip
"""Suffixes of files that a user may take for images, but that are skipped."""

_SYSTEM = frozenset(
    (
        "@eadir", "@recycle", "@recently-snapshot", "@tmp", "#recycle", "#snapshot", "__macosx", "__pycache__",
        "$recycle.bin", "system volume information", "lost+found",
    )
)  # fmt: skip
"""Names in lower case of folders that systems create beside the user's."""


def is_image_name(name: str) -> bool:
    """Return whether a file of this name is an image.

    An AppleDouble file (``._*``), which macOS leaves beside others, is not.
    """
    return name.lower().endswith(SUFFIXES) and not name.startswith("._")


def is_class_name(name: str) -> bool:
    """Return whether a folder of this name is a class: hidden folders and system folders are not."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


@dataclass(frozen=True)
class FolderContents:
    """The entries of one folder by kind, each list sorted."""

    images: list[str]
    folders: list[str]
    """Folders that may hold images, and links to such folders."""
    hidden: list[str]
    """Hidden folders and system folders."""
    others: list[str]
    """All other files."""

    @property
    def entries(self) -> int:
        """Number of entries of all kinds."""
        return len(self.images) + len(self.folders) + len(self.hidden) + len(self.others)

    @property
    def unread(self) -> list[str]:
        """Files in ``others`` that a user may take for images."""
        return [name for name in self.others if name.lower().endswith(_UNREAD) and not name.startswith("._")]


def look_into(folder: Path) -> FolderContents:
    """List the entries of ``folder`` by kind, from their names and types alone.

    Raises:
        OSError: If the folder cannot be listed.
    """
    images: list[str] = []
    folders: list[str] = []
    hidden: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            named_so = is_image_name(entry.name)
            # Do not follow a link with an image's name: with a million of them it would take long.
            if entry.is_dir(follow_symlinks=not named_so):
                (folders if is_class_name(entry.name) else hidden).append(entry.name)
            else:
                (images if named_so else others).append(entry.name)
    return FolderContents(sorted(images), sorted(folders), sorted(hidden), sorted(others))


def class_folders(split: Path) -> list[str]:
    """Return the names of the class folders in ``split``, sorted.

    Raises:
        UserError: A link leads nowhere: without its class, others would have other labels.
        OSError: The folder, or what a link in it leads to, cannot be listed.
    """
    contents = look_into(split)
    for name in contents.others:
        if not (name.startswith(".") or (split / name).exists()):
            raise UserError(
                f"{split / shown(name)} is a link that leads nowhere; make it lead to its class, or remove it"
            )
    return contents.folders


def read_file(path: str) -> bytes:
    """Return the bytes of a file; none of a pipe, which would be waited for."""
    with open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        return file.read() or b""


def images_below(folder: Path, within: str = "") -> Iterator[str]:
    """Yield the images in ``folder`` and its subfolders, as paths relative to it with ``within`` in front.

    Links to folders are not followed, and hidden and system folders are skipped.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_class_name(name))
        inside = os.path.relpath(place, folder)
        start = os.path.join(within, "" if inside == "." else inside)  # noqa: PTH118  (pathlib would change odd names)
        yield from (os.path.join(start, name) for name in sorted(files) if is_image_name(name))  # noqa: PTH118


def shown(name: str) -> str:
    """Return a file name as text that can be printed; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")
