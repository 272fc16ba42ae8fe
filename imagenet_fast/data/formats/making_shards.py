"""Shards made of pictures: the same bytes whenever they are made of the same, with the indexes that DALI's own readers
ask for and with ours.

Each shard is there whole or not at all.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imagenet_fast.data.formats.crc32c import masked_crc32c
from imagenet_fast.data.formats.example_proto import write_example
from imagenet_fast.data.formats.shards import CLASSES
from imagenet_fast.data.formats.tfrecord import HEAD, TAIL, open_tfrecord
from imagenet_fast.data.formats.webdataset import PICTURES, open_webdataset
from imagenet_fast.errors import UserError

_WHEN_S = 1_325_376_000  # 2012, as in ImageNet's archives: an index holds the time of its shards, and is to be the same
_MAGIC = {b"\xff\xd8": "jpg", b"\x89PNG": "png", b"BM": "bmp", b"RIFF": "webp"}


class Sample(NamedTuple):
    """A picture as it is stored, and where it comes from."""

    name: str
    encoded: bytes
    label: int
    """An index into the names of the classes."""


def write_webdataset(
    samples: Iterable[Sample], classes: Sequence[str], folder: Path, split: str, shard_bytes: int
) -> list[Path]:
    """``train-000000.tar`` and so on in ``folder``, in the order given, of up to ``shard_bytes`` of pictures each, with
    ``classes.txt``. Returns the shards. Raises UserError where a class cannot be named so, or where others are named
    there already."""
    write_classes(folder, classes)
    paths = []
    for shard, numbered in _cut(samples, shard_bytes):
        paths.append(folder / f"{split}-{shard:06}.tar")
        write_tar(paths[-1], numbered)
    _alone(folder, f"{split}-*.tar", paths)
    open_webdataset(folder, split, paths)
    return paths


def write_tfrecord(
    samples: Iterable[Sample], classes: Sequence[str], folder: Path, split: str, shard_bytes: int
) -> list[Path]:
    """``train-00000-of-01024`` and so on, or ``validation-``, as :func:`write_webdataset` writes tars. Labels run from
    1 on, as with TensorFlow's scripts, and every record names its class."""
    write_classes(folder, classes)
    partial = []
    for shard, numbered in _cut(samples, shard_bytes):
        partial.append(folder / f".{split}-{shard:05}")
        write_records(partial[-1], (sample for _, sample in numbered), classes)
    name = {"val": "validation"}.get(split, split)
    paths = [folder / f"{name}-{shard:05}-of-{len(partial):05}" for shard in range(len(partial))]
    for before, after in zip(partial, paths, strict=True):
        _dali_index(before).replace(_dali_index(after))
        before.replace(after)
    _alone(folder, f"{name}-*-of-*[0-9]", paths)
    open_tfrecord(folder, split, paths, ())
    return paths


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """``classes.txt``. Raises UserError where a name has more than one line, or where there are other names."""
    if strange := [name for name in classes if not name or "\n" in name or name.endswith("\r")]:
        raise UserError(f"a class named {strange[0]!r} does not fit a line of {CLASSES}; rename its folder")
    content = b"".join(os.fsencode(name) + b"\n" for name in classes)
    path = folder / CLASSES
    if path.exists() and path.read_bytes() != content:
        raise UserError(f"{path} names other classes than are to be written there; give another directory")
    folder.mkdir(parents=True, exist_ok=True)
    with _whole(path) as file:
        file.write(content)


def write_tar(path: Path, samples: Iterable[tuple[int, Sample]]) -> None:
    """One shard of WebDataset, and DALI's index as its ``wds2idx`` makes it. Numbers are the samples' keys."""
    lines: list[str] = []
    with _whole(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in samples:
            parts = []
            for extension, content in ((_extension(sample), sample.encoded), ("cls", b"%d" % sample.label)):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size, member.mtime = len(content), _WHEN_S
                parts.append(f"{extension} {tar.offset + tarfile.BLOCKSIZE} {len(content)} {member.name}")
                tar.addfile(member, io.BytesIO(content))
            lines.append(" ".join(parts))
    _write_lines(_dali_index(path), [f"v1.2 {len(lines)}", *lines])


def write_records(path: Path, samples: Iterable[Sample], classes: Sequence[str]) -> None:
    """One shard of TFRecords, and DALI's index as its ``tfrecord2idx`` makes it."""
    lines: list[str] = []
    with _whole(path) as file:
        for sample in samples:
            example = write_example(
                {
                    "image/class/label": sample.label + 1,
                    "image/class/synset": os.fsencode(classes[sample.label]),
                    "image/encoded": sample.encoded,
                    "image/filename": os.fsencode(sample.name),
                    "image/format": {"jpg": "JPEG"}.get(_extension(sample), _extension(sample).upper()).encode(),
                }
            )
            length = len(example).to_bytes(8, "little")
            lines.append(f"{file.tell()} {HEAD.size + len(example) + TAIL.size}")
            file.write(HEAD.pack(len(example), masked_crc32c(length)) + example + TAIL.pack(masked_crc32c(example)))
    _write_lines(_dali_index(path), lines)


def _cut(samples: Iterable[Sample], shard_bytes: int) -> Iterator[tuple[int, Iterator[tuple[int, Sample]]]]:
    """The samples of each shard, numbered over all shards; taken one by one, as they are many."""

    def placed() -> Iterator[tuple[int, tuple[int, Sample]]]:
        shard = filled = 0
        for number, sample in enumerate(samples):
            if filled and filled + len(sample.encoded) > shard_bytes:
                shard, filled = shard + 1, 0
            filled += len(sample.encoded)
            yield shard, (number, sample)

    for shard, group in groupby(placed(), key=lambda place: place[0]):
        yield shard, (numbered for _, numbered in group)


def _alone(folder: Path, pattern: str, paths: Sequence[Path]) -> None:
    """Raise UserError where shards of another making lie there, since they would be read too."""
    if others := sorted(set(folder.glob(pattern)) - set(paths)):
        raise UserError(f"{others[0]} is none of the {len(paths)} shards that were written now; remove what is older")


def _extension(sample: Sample) -> str:
    """By its first bytes, whatever it is named."""
    named = Path(sample.name).suffix[1:].lower()
    known = (extension for magic, extension in _MAGIC.items() if sample.encoded.startswith(magic))
    return next(known, named if named in PICTURES else "jpg")


def _dali_index(path: Path) -> Path:
    return path.with_suffix(".idx") if path.suffix == ".tar" else path.with_name(f"{path.name}.idx")


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with _whole(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes ``path`` when the block ends well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.utime(partial, (_WHEN_S, _WHEN_S))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
