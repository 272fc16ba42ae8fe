"""ImageNet as people have it, with few classes: the official tars, Kaggle's layout, one folder a class, and others.

    images = small_imagenet()
    official_tars(tmp_path / "tars", images)

What prepare should make of any of them is ``good(images)``. The odd ones of the real set are among them, and such as
are found on disks: see ``ODD``.
"""

from __future__ import annotations

import csv
import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.encoded import encoded

CLASSES = {"n02105855": 171, "n02123045": 174, "n01440764": 449, "n01443537": 450}
"""Wnids, with the numbers that the devkit has for them."""

ODD = {
    "png": "train/n02105855/n02105855_2933.JPEG",
    "cmyk": "train/n02123045/n02123045_7.JPEG",
    "rotated": "train/n01440764/n01440764_6.JPEG",
    "truncated": "train/n01443537/n01443537_5.JPEG",
    "empty": "train/n01443537/n01443537_6.JPEG",
    "garbage": "train/n01443537/n01443537_7.JPEG",
    "AppleDouble": "train/n01440764/._n01440764_18.JPEG",
    "twin": "train/n02123045/n02123045_8.JPEG",
}
"""Where files are that are not what their names say, or need care. The twin is a copy of another class's image."""

Images = dict[str, bytes]
"""By path, as prepare should make it: ``train/<wnid>/<file>``."""


def photo(number: int, short: int = 300, long: int = 400, mode: str = "RGB") -> Image.Image:
    """Smooth, and like no other of another number."""
    blobs = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    size = (long, short) if number % 2 else (short, long)
    return Image.fromarray(blobs).resize(size, Image.Resampling.BICUBIC).convert(mode)


def small_imagenet(train: int = 8, val: int = 3) -> Images:
    """So many images a class. A third of them have a short side of 200 pixels, the others of 300."""
    images: Images = {}
    number = 0
    for wnid in CLASSES:
        for index in range(train):
            number += 1
            shape = (200, 260) if index % 3 == 0 else (300, 400)
            images[f"train/{wnid}/{wnid}_{index}.JPEG"] = encoded(photo(number, *shape), "JPEG", quality=90)
    validation = [wnid for _ in range(val) for wnid in sorted(CLASSES, reverse=True)]
    for index, wnid in enumerate(validation, 1):
        images[f"val/{wnid}/ILSVRC2012_val_{index:08}.JPEG"] = encoded(photo(1000 + index), "JPEG", quality=90)
    return images | odd_images()


def odd_images() -> Images:
    turned = Image.Exif()
    turned[0x0112] = 6  # Orientation: to be shown turned by 90 degrees
    whole = encoded(photo(2001), "JPEG", quality=90)
    return {
        ODD["png"]: encoded(photo(1), "PNG"),
        ODD["cmyk"]: encoded(photo(2, mode="CMYK"), "JPEG"),
        ODD["rotated"]: encoded(photo(3), "JPEG", exif=turned),
        ODD["truncated"]: whole[: len(whole) // 2],
        ODD["empty"]: b"",
        ODD["garbage"]: np.random.default_rng(0).bytes(3000),
        ODD["AppleDouble"]: b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(100),
        ODD["twin"]: encoded(photo(2000), "JPEG", quality=90),
    } | {"train/n01443537/n01443537_1.JPEG": encoded(photo(2000), "JPEG", quality=90)}


def good(images: Images) -> Images:
    """Without what is no image by its name."""
    return {path: content for path, content in images.items() if "/._" not in path}


def official_tars(folder: Path, images: Images) -> Path:
    """The three files that image-net.org gives. Returns ``folder``."""
    folder.mkdir(parents=True)
    by_class: dict[str, Images] = {}
    for path, content in images.items():
        split, wnid, name = path.split("/")
        if split == "train":
            by_class.setdefault(f"{wnid}.tar", {})[name] = content
    write_tar(folder / "ILSVRC2012_img_train.tar", {name: tar_of(files) for name, files in by_class.items()})
    validation = _validation(images)
    write_tar(
        folder / "ILSVRC2012_img_val.tar",
        {name: images[f"val/{wnid}/{name}"] for name, wnid in sorted(validation.items())},
    )
    truth = [CLASSES[wnid] for _, wnid in sorted(validation.items())]
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit(truth))
    return folder


def devkit(truth: list[int]) -> bytes:
    """The labels of validation images 1, 2, ... by the kit's numbers."""
    lines = "".join(f"{number}\n" for number in truth).encode()
    return gzip.compress(tar_of({"ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": lines}))


def kaggle(folder: Path, images: Images) -> None:
    """What Kaggle's archive unpacks to."""
    top = folder / "ILSVRC/Data/CLS-LOC"
    image_folder(top, _of_split(images, "train") | _flat(images, "val"))
    with (folder / "LOC_val_solution.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ImageId", "PredictionString"])
        for name, wnid in sorted(_validation(images).items(), key=lambda item: item[1]):
            rows.writerow([name.removesuffix(".JPEG"), f"{wnid} 1 2 30 40 {wnid} 5 6 70 80 "])


def class_tars(folder: Path, images: Images) -> None:
    """The outer tar of class tars unpacked into ``train``."""
    official_tars(folder, images)
    _unpacked(folder / "ILSVRC2012_img_train.tar", folder / "train")


def flat_validation(folder: Path, images: Images) -> None:
    """The tar of validation images unpacked into ``val``, beside the devkit."""
    official_tars(folder, images)
    _unpacked(folder / "ILSVRC2012_img_val.tar", folder / "val")


def sorted_validation(folder: Path, images: Images) -> None:
    """The tar of validation images sorted into class folders, and the other as it is."""
    official_tars(folder, images)
    (folder / "ILSVRC2012_img_val.tar").unlink()
    (folder / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    image_folder(folder, _of_split(images, "val"))


def parquet(folder: Path, images: Images, in_each: int = 7) -> None:
    """Files with the schema of Hugging Face's, and small groups of rows."""
    import pyarrow
    from pyarrow.parquet import write_table

    schema = pyarrow.schema(
        [
            ("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])),
            ("label", pyarrow.int64()),
        ]
    )
    (folder / "data").mkdir(parents=True)
    for split, word in (("train", "train"), ("val", "validation")):
        rows = []
        for path, content in _of_split(images, split).items():
            wnid, name = path.split("/")[1:]
            named = f"{name.removesuffix('.JPEG')}_{wnid}.JPEG"
            rows.append({"image": {"bytes": content, "path": named}, "label": sorted(CLASSES).index(wnid)})
        rows = rows[::2] + rows[1::2]  # of several classes in each file
        parts = [rows[begin : begin + in_each] for begin in range(0, len(rows), in_each)]
        for number, part in enumerate(parts):
            table = pyarrow.Table.from_pylist(part, schema=schema)
            write_table(table, folder / f"data/{word}-{number:05}-of-{len(parts):05}.parquet", row_group_size=3)


def _of_split(images: Images, split: str) -> Images:
    return {path: content for path, content in images.items() if path.startswith(f"{split}/")}


def _flat(images: Images, folder: str) -> Images:
    """Validation images in one folder."""
    return {f"{folder}/{path.split('/')[2]}": content for path, content in _of_split(images, "val").items()}


def _unpacked(tar: Path, folder: Path) -> None:
    with tarfile.open(tar) as archive:
        archive.extractall(folder, filter="data")
    tar.unlink()


def image_folder(folder: Path, images: Mapping[str, bytes]) -> Path:
    """Files by their paths, as one folder a class. Returns ``folder``."""
    for path, content in images.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def _validation(images: Images) -> dict[str, str]:
    """The wnid of each validation image, by its name."""
    paths = (path.split("/") for path in images)
    return {name: wnid for split, wnid, name in paths if split == "val"}


Members = dict[str, bytes | tarfile.TarInfo]
"""Files of a tar by their paths; a TarInfo is a member without content, under the name that it has."""


def tar_of(files: Mapping[str, bytes | tarfile.TarInfo], format: int = tarfile.PAX_FORMAT) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format) as archive:
        for path, content in files.items():
            info = named(path) if isinstance(content, bytes) else content
            info.size = len(content) if isinstance(content, bytes) else 0
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return written.getvalue()


def named(path: str, kind: bytes = tarfile.REGTYPE, leads_to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = kind, leads_to
    return info


def write_tar(path: Path, files: Mapping[str, bytes | tarfile.TarInfo]) -> None:
    path.write_bytes(tar_of(files))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file in ``folder``, hidden ones too, by its path there; of an index, which holds times, that it is.

    What is left of an index whose writer was killed is no part of it.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("..imagenet"))
    return {str(path.relative_to(folder)): b"" if path.suffix == ".index" else path.read_bytes() for path in files}


LAYOUTS = (official_tars, kaggle, image_folder, class_tars, flat_validation, sorted_validation, parquet)
