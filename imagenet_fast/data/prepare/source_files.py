"""Files of a source by where their bytes lie, in archives or on their own: all that a writer of any format needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from imagenet_fast.data.folders import is_image_name, shown
from imagenet_fast.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source: ``size`` bytes of the file ``held_by``, from ``offset``."""

    name: str
    held_by: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            UserError: The bytes cannot be read, or there are fewer than ``size``.
        """
        try:
            with open(self.held_by, "rb", buffering=0) as file:  # noqa: PTH123  (a million of them)
                content = os.pread(file.fileno(), self.size, self.offset)
        except OSError as error:
            raise UserError(
                f"{self.held_by} cannot be read ({error.strerror}); put that right, and the same command goes on"
            ) from None
        if len(content) != self.size:
            raise UserError(f"{self.held_by} breaks off within '{self.name}'; fetch it again")
        return content

    @property
    def is_image(self) -> bool:
        """True if the name is that of an image, by the rule of ``ImageFolder``."""
        return is_image_name(self.name)

    @property
    def shown(self) -> str:
        """The name as text, whatever its bytes are."""
        return shown(self.name)


@dataclass(frozen=True, eq=False)
class SourceClass:
    """One class of one split of a source."""

    split: str
    name: str
    listed: Callable[[], list[SourceFile]]
    """Function that returns the class's files, each name once; some may not be images.

    It raises UserError for a bad name.
    """
    size: int | None = None
    """Bytes that the files take, or slightly fewer; None if the files must be listed to know."""

    @property
    def path(self) -> str:
        """The class's path, ``split/name``."""
        return f"{self.split}/{self.name}"

    def measured(self) -> int:
        """Return the bytes that the files take; they are listed if ``size`` is None."""
        return sum(file.size for file in self.listed()) if self.size is None else self.size

    def sorted_out(self) -> tuple[list[SourceFile], tuple[str, ...]]:
        """Return the images of the class, and the sorted names of its other files.

        Raises:
            UserError: There are no images, or the class cannot be listed.
        """
        try:
            files = self.listed()
        except OSError as error:
            raise UserError(
                f"{error.filename or self.path} cannot be read ({error.strerror}); put that right, and the same "
                "command goes on"
            ) from None
        images = [file for file in files if file.is_image]
        if not images:
            raise UserError(f"{self.path} has no images in the source; add them, or leave that class out")
        return images, tuple(sorted(file.shown for file in files if not file.is_image))


@dataclass(frozen=True)
class Source:
    """ImageNet, or a part of it, as the user has it."""

    told: str
    """The layout that it was recognised as."""
    classes: list[SourceClass]
    others: list[str] = field(default_factory=list)
    """Files that belong to no class and are left out."""
    md5: dict[Path, str] = field(default_factory=dict)
    """The md5 that each archive must have to be the one from image-net.org."""
    apart: list[str] = field(default_factory=list)
    """Images that are not directly in a class's folder, and are left out."""
    hidden: list[str] = field(default_factory=list)
    """Folders whose names are not those of classes."""
