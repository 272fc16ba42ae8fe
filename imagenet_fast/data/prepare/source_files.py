"""Images by where their bytes lie, in archives or in files of their own: all that a writer of any format asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from imagenet_fast.data.image_names import is_image_name, shown
from imagenet_fast.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source: ``size`` bytes of the file ``held_by`` from ``offset`` on."""

    name: str
    held_by: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Its bytes. Raises UserError where there are fewer, or they cannot be read."""
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
        """By its name, as ImageFolder takes them."""
        return is_image_name(self.name)

    @property
    def shown(self) -> str:
        """Its name as text, whatever its bytes are."""
        return shown(self.name)


@dataclass(frozen=True, eq=False)
class SourceClass:
    """One class of one split of a source."""

    split: str
    name: str
    listed: Callable[[], list[SourceFile]]
    """Its files, each name once; others than images may be among them. Raises UserError where a name is amiss."""
    size: int | None = None
    """Bytes that they take, or a little less; None where only listing them tells."""

    @property
    def path(self) -> str:
        return f"{self.split}/{self.name}"

    def measured(self) -> int:
        return sum(file.size for file in self.listed()) if self.size is None else self.size

    def sorted_out(self) -> tuple[list[SourceFile], tuple[str, ...]]:
        """Its images, and the names of files that are none. Raises UserError where there are no images, or it
        cannot be listed."""
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
    """ImageNet, or a part of it, as somebody has it."""

    told: str
    """What it was taken for."""
    classes: list[SourceClass]
    others: list[str] = field(default_factory=list)
    """Files that belong to no class and are left out."""
    md5: dict[Path, str] = field(default_factory=dict)
    """What the archives must have, by which they are those that image-net.org gives."""
    apart: list[str] = field(default_factory=list)
    """Images that lie in no class's own folder, and are left out."""
    hidden: list[str] = field(default_factory=list)
    """Folders that are no classes, by their names."""
