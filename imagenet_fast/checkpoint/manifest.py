"""What a checkpoint holds: of which moment of which training, in which files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from imagenet_fast.checkpoint.durable_io import FileSum, sum_of, write_durably
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table

MANIFEST = "manifest.json"
SHARED = "shared.safetensors"


def part_name(rank: int) -> str:
    """The file of what is a rank's own."""
    return f"rank-{rank:05}.safetensors"


class CorruptCheckpoint(Exception):
    """A checkpoint is not whole; the message is the name of the file and what is wrong with it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path.name} {what}")


class NotSaved(UserError):
    """A checkpoint could not be written; those before it are as they were."""

    def __init__(self, failure: str, remedy: str, then: str, freed: bool = False) -> None:
        super().__init__(f"{failure}; {remedy}, then {then}")
        self.in_short = f"{failure}; {remedy}"
        """Without what is to be done if the run ends."""
        self.freed = freed
        """Whether rank 0 has removed old checkpoints since, so that another try may have room."""


class Stamp(Table):
    """The moment of a training, and the training."""

    step: NonNegativeInt
    epoch: NonNegativeInt
    world: PositiveInt
    """How many ranks there were."""
    layout: dict[str, PositiveInt]
    """Their number along each axis, such as data and tensor."""
    recipe: str
    """A digest of what decides the result."""
    top1: float | None = None
    """Percent, where the weights have been evaluated."""


class Manifest(Stamp):
    format: Literal[1] = 1
    number: PositiveInt
    """The how many-eth checkpoint of its run. A run that went back writes later ones at earlier steps, and the clock
    may be set back, so this alone says which is the newest."""
    files: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.safetensors$")], FileSum]
    crc32: str = ""
    """Of all else that is here."""

    def write(self, folder: Path) -> None:
        """Make ``folder`` a checkpoint. Raises OSError."""
        sealed = self.model_copy(update={"crc32": self._sum()})
        write_durably(folder / MANIFEST, [sealed.model_dump_json(indent=2).encode() + b"\n"])

    def _sum(self) -> str:
        return sum_of([self.model_dump_json(exclude={"crc32"}).encode()]).crc32


def read_manifest(folder: Path) -> Manifest:
    """Raises Damaged; FileNotFoundError where ``folder`` is no checkpoint, or not yet."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise CorruptCheckpoint(path, "is no file")
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptCheckpoint(path, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptCheckpoint(
            path, f"is not a manifest of format 1 ({where + ': ' if where else ''}{first['msg']})"
        ) from None
    if manifest.crc32 != manifest._sum():
        raise CorruptCheckpoint(path, "disagrees with its own checksum")
    return manifest
