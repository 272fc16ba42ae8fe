"""Read the three files of image-net.org: a tar of class tars, a flat tar of validation images, and the devkit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

from imagenet_fast.data.prepare.source_files import Source, SourceClass, SourceFile
from imagenet_fast.data.prepare.tar_index import Member, member, members
from imagenet_fast.errors import UserError

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"

MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}
"""The md5 of each file, as image-net.org and torchvision publish them."""

_META = "ILSVRC2012_devkit_t12/data/meta.mat"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_MOST = 64 << 20  # bytes of either file; each has less than 1 MiB


def official_source(folder: Path) -> Source:
    """Return the source made of those of the three files that are in ``folder``.

    At least one of the two image tars must be there. Only the names of class tars are read, not their contents.

    Raises:
        UserError: A file is damaged or missing, or has a member that it should not have.
    """
    train, val, kit = (folder / name for name in MD5)
    devkit = read_devkit(kit) if kit.is_file() else None
    classes = list(_training(train, devkit)) if train.is_file() else []
    others: list[str] = []
    if val.is_file():
        if devkit is None:
            raise UserError(
                f"{val} does not say of which class its images are; put {DEVKIT} beside it, from where you have it"
            )
        images = _validation(val, devkit, others)
        classes += flat_classes(images)
    return Source("ImageNet's tars", classes, others, {folder / name: md5 for name, md5 in MD5.items()})


def _training(tar: Path, devkit: Devkit | None) -> Iterator[SourceClass]:
    for class_tar in members(tar):
        wnid = class_tar.name.removesuffix(".tar")
        if not class_tar.name.endswith(".tar") or not re.fullmatch(r"n\d{8}", wnid):
            raise UserError(
                f"{tar} has a member '{class_tar.name}', which is no class's; it must hold n01440764.tar and the like"
            )
        if devkit is not None and wnid not in devkit.wnids:
            raise UserError(f"{tar} has a class {wnid} that {DEVKIT} beside it does not know; fetch both again")
        yield SourceClass("train", wnid, partial(_listed, tar, class_tar), class_tar.size)


def _listed(tar: Path, class_tar: Member) -> list[SourceFile]:
    return list(members(tar, within=class_tar))


def _validation(tar: Path, devkit: Devkit, others: list[str]) -> dict[str, list[SourceFile]]:
    """Return validation images by class, and add the names of files that are not images to ``others``."""
    images: dict[str, list[SourceFile]] = defaultdict(list)
    for file in members(tar):
        if not file.is_image:
            others.append(f"val/{file.shown}")
            continue
        told = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", file.name)
        number = 0 if told is None else int(told[1])
        if not 0 < number <= len(devkit.validation):
            raise UserError(
                f"{tar} has a member '{file.name}', of which {DEVKIT} has no label; it must hold "
                "ILSVRC2012_val_00000001.JPEG and the like"
            )
        images[devkit.validation[number - 1]].append(file)
    return images


def flat_classes(images: dict[str, list[SourceFile]]) -> list[SourceClass]:
    """Return the validation classes for ``images``, which maps class names to images that all lie in one place."""
    return [
        SourceClass("val", name, partial(list, files), sum(file.size for file in files))
        for name, files in images.items()
    ]


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
