"""Describe the data of a run, so that all ranks, and a resumed run, can check that they train on the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from imagenet_fast.data.bad_images import QUARANTINE
from imagenet_fast.data.image_names import shown
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import first_difference
from imagenet_fast.errors import UserError

Contents = dict[str, Any]
"""Class names in label order and, for each split, the number of images and a digest of their names and labels.

The digest does not depend on where the data lies. All values are plain, so that a checkpoint can hold them. Synthetic
images have no names.
"""


def contents_of_split(images: int, source: ImageSource | None) -> dict[str, Any]:
    """Describe one split by its number of ``images`` and a digest of ``source`` (None: synthetic images)."""
    return {"images": images, "digest": "" if source is None else source.digest()}


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
    return found


def _class_differences(before: list[str], now: list[str]) -> list[str]:
    gone = sorted(set(before) - set(now))
    added = sorted(set(now) - set(before))
    more = f" and {max(len(gone), len(added)) - 1} more such" if max(len(gone), len(added)) > 1 else ""
    match gone, added:
        case [], []:
            moved = (place for place, names in enumerate(zip(before, now, strict=True)) if names[0] != names[1])
            return [f"the class '{now[place]}' as number {place} for '{before[place]}'" for place in [*moved][:1]]
        case [], [first, *_]:
            return [f"a class '{first}' that it had not{more}"]
        case [first, *_], []:
            return [f"no class '{first}' any more{more}"]
        case _:
            return [f"the class '{added[0]}' for '{gone[0]}'{more}"]


def compare_data(own: Contents, world: DistContext) -> None:
    """Compare the description of this rank's images with rank 0's; a collective call: each node may keep its own copy.

    Ranks that permute different sets would train some images twice, leave others out or mislabel them, and end their
    epochs at different steps.

    Raises:
        UserError: On every rank, if some rank has other images than rank 0.
    """

    def described(ours: Contents | None, theirs: Contents | None, rank: int, first: int) -> str:
        changed = " and ".join(differences(theirs or own, ours or own))
        return (
            f"rank {rank} has other images than rank {first}: {changed}; copy the same images, and the same "
            f"{QUARANTINE} if there is one, to every node"
        )

    if said := first_difference([own], described, world.device):
        raise UserError(said)
