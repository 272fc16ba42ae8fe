"""ImageNet's development kit: which classes there are, and of which each validation image is."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from imagenet_fast.data.prepare.tar_index import member
from imagenet_fast.errors import UserError

_META = "ILSVRC2012_devkit_t12/data/meta.mat"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_MOST = 64 << 20  # bytes of either; they have less than one


@dataclass(frozen=True)
class Devkit:
    wnids: frozenset[str]
    """Of the classes."""
    validation: list[str]
    """The wnid of validation image n at n - 1."""


def read_devkit(archive: Path) -> Devkit:
    """From ``ILSVRC2012_devkit_t12.tar.gz``. Raises UserError where it is damaged, or contradicts itself.

    The kit has a number for every class, in an order of its own: it is by meta.mat alone that a number of the ground
    truth becomes a wnid. Nodes of WordNet that have children are not classes of the challenge.
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
    """By the kit's numbers."""
    from scipy.io import loadmat

    content = member(archive, _META, _MOST)
    try:
        synsets = loadmat(BytesIO(content))["synsets"].ravel()
        return {
            int(node["ILSVRC2012_ID"].item()): str(node["WNID"].item())
            for node in synsets
            if int(node["num_children"].item()) == 0
        }
    except Exception as error:  # scipy's reader raises of every kind where a file is not as it should be
        raise UserError(f"{archive}: {_META} cannot be read ({error}); fetch it again") from None
