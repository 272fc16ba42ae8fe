"""Read ImageNet's development kit: its classes, and the class of each validation image."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from imagenet_fast.data.prepare.tar_index import member
from imagenet_fast.errors import UserError

_META = "ILSVRC2012_devkit_t12/data/meta.mat"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_MOST = 64 << 20  # bytes of either file; each has less than 1 MiB


@dataclass(frozen=True)
class Devkit:
    """The classes and validation labels in the development kit."""

    wnids: frozenset[str]
    """The wnids of all classes."""
    validation: list[str]
    """The wnid of each validation image: that of image n is at index n - 1."""


def read_devkit(archive: Path) -> Devkit:
    """Read the development kit ``ILSVRC2012_devkit_t12.tar.gz``.

    The kit numbers the classes in an order of its own. Only meta.mat maps a number in the ground truth to a wnid.
    WordNet nodes that have children are not classes of the challenge.

    Raises:
        UserError: The archive is damaged, or contradicts itself.
    """
    wnid = _wnids(archive)
    truth = member(archive, _TRUTH, _MOST)
    try:
        return Devkit(frozenset(wnid.values()), [wnid[int(line)] for line in truth.split()])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{archive}: {_TRUTH} has {error} for a label, which {_META} does not know; fetch it again"
        ) from None


def _wnids(archive: Path) -> dict[int, str]:
    """Return the wnids of the classes by the kit's numbers."""
    from scipy.io import loadmat

    content = member(archive, _META, _MOST)
    try:
        synsets = loadmat(BytesIO(content))["synsets"].ravel()
        return {
            int(node["ILSVRC2012_ID"].item()): str(node["WNID"].item())
            for node in synsets
            if int(node["num_children"].item()) == 0
        }
    except Exception as error:  # scipy's reader raises exceptions of any type for a bad file
        raise UserError(f"{archive}: {_META} cannot be read ({error}); fetch it again") from None
