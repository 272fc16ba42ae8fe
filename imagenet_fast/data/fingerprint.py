"""Describe the data of a run, so that all ranks, and a resumed run, can check that they train on the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from imagenet_fast.data.folders import shown
from imagenet_fast.data.index import digest_of
from imagenet_fast.data.pixels import ImageDecodeError
from imagenet_fast.data.quarantine import QUARANTINE
from imagenet_fast.data.source import ImageSource, patiently
from imagenet_fast.distributed.consistency import first_difference
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import UserError

_SAMPLE = 16  # images of a split whose bytes are compared

Contents = dict[str, Any]
"""Class names in label order and, for each split, the number of images, a digest of their names and labels, and one of
the bytes of some of them.

The digests do not depend on where the data lies. All values are plain, so that a checkpoint can hold them. Synthetic
images have no names.
"""


def contents_of_split(images: int, source: ImageSource | None) -> dict[str, Any]:
    """Describe one split by its number of ``images`` and digests of ``source`` (None: synthetic images).

    Raises:
        UserError: An image cannot be read.
    """
    if source is None:
        return {"images": images, "digest": "", "sample": ""}
    count, sample = min(images, _SAMPLE), []
    for index in (number * images // count for number in range(count)):
        try:
            with suppress(ImageDecodeError):  # the loader will name it
                sample.append(patiently(source, index, source.read))
        except OSError as error:
            raise UserError(f"{source.name(index)} cannot be read ({error.strerror}); put that right") from None
    return {"images": images, "digest": source.digest(), "sample": digest_of(*sample)}


def contents(classes: Sequence[str], train: Mapping[str, Any], val: Mapping[str, Any]) -> Contents:
    """Describe a data set by its classes and its two splits, each as returned by ``contents_of_split``."""
    return {"classes": [shown(name) for name in classes], "train": dict(train), "val": dict(val)}


def differences(before: Contents, now: Contents) -> list[str]:
    """Return how the data ``now`` differs from ``before``, as phrases for a message; empty if it does not."""
    found = _class_differences(before["classes"], now["classes"])
    named = bool(found)
    for split, what in (("train", "training"), ("val", "validation")):
        old, new = before[split], now[split]
        if old["images"] != new["images"]:
            found.append(f"{new['images']} {what} images for {old['images']}")
        elif old["digest"] != new["digest"] and not named:
            found.append(f"other names or labels of its {what} images")
        elif old["digest"] == new["digest"] and old.get("sample") != new.get("sample"):
            found.append(f"other {what} images under the same names, perhaps of another size")
    return found


def _class_differences(before: list[str], now: list[str]) -> list[str]:
    gone, added = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    most = max(len(gone), len(added))
    more = f" and {most - 1} more such" if most > 1 else ""
    if gone and added:
        return [f"the class '{added[0]}' for '{gone[0]}'{more}"]
    if gone or added:
        return [f"no class '{gone[0]}' any more{more}" if gone else f"a class '{added[0]}' that it had not{more}"]
    moved = (number for number, names in enumerate(zip(before, now, strict=True)) if names[0] != names[1])
    return [f"the class '{now[number]}' as number {number} for '{before[number]}'" for number in [*moved][:1]]


def compare_data(own: Contents, world: DistContext) -> None:
    """Compare the description of this rank's images with rank 0's; a collective call: each node may keep its own copy.

    Ranks that permute different sets would train some images twice, leave others out or mislabel them, and end their
    epochs at different steps.

    Raises:
        UserError: On every rank, if some rank has other images than rank 0.
    """

    def describe(theirs: Contents) -> str:
        changed = " and ".join(differences(theirs, own))
        return (
            f"rank {world.rank} has other images than rank 0: {changed}; copy the same images, and the same "
            f"{QUARANTINE} if there is one, to every node"
        )

    if said := first_difference(own, describe, world.device):
        raise UserError(said)
