"""TFRecord shards: each record is an Example with an image and a label, as TensorFlow's ImageNet scripts write it.

A record is its length (uint64), the masked CRC-32C of the length (uint32), the Example, and the masked CRC-32C of the
Example (uint32), all little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.archives import refuse_compressed
from imagenet_fast.data.index import Index, Kind, load_or_build_index, map_in_order
from imagenet_fast.data.shards import COLUMNS, Row, Shards, columns_of, read_classes
from imagenet_fast.errors import UserError

HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")

_IMAGES = ("image/encoded", "image")  # in TensorFlow's scripts; in TensorFlow Datasets
_LABELS = ("image/class/label", "label")
_SYNSET = "image/class/synset"
_WINDOW = 512  # bytes read at once
_LARGEST = 1 << 31
_AGAIN = "copy or make it again"
_MASK = 0xA282EAD8


Span = tuple[int, int]
"""Offsets in the file: the first byte, and the end (exclusive)."""

Fetch = Callable[[int, int], bytes]
"""A function that returns the file's bytes from one offset to another."""

_LONGEST_KEY = 256

Record = tuple[Row, str]
"""One record's row in the index, and its synset; empty if it names none."""


def masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of ``content``, masked as TensorFlow does."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class RecordShards(Shards):
    """One split in TFRecord shards. A record's checksum is compared when it is first read."""

    def __init__(self, files: Sequence[Path], index: Index, labels: NDArray[np.int64], classes: list[str]) -> None:
        """Create the split as ``Shards`` does, with no record checked yet."""
        super().__init__(files, index, labels, classes)
        self._sound = bytearray(len(self))

    def name(self, index: int) -> str:
        """Return the shard, the number of the record counted from 0, and its offset."""
        shard = self._shards[index]
        number = index - int(np.searchsorted(self._shards, shard))
        return f"{self.files[shard]}: record {number} at byte {self._record(index)}"

    def read(self, index: int) -> bytes:
        """Return image ``index``, still encoded.

        Raises:
            UserError: The record is damaged.
        """
        if self._sound[index]:
            return super().read(index)
        begin, place = self._record(index), int(self._offsets[index])
        length, _ = HEAD.unpack(self.read_at(index, begin, HEAD.size))
        if not place - begin <= HEAD.size + length < _LARGEST:
            raise UserError(f"{self.name(index)} is not there any more; {_AGAIN}")
        record = self.read_at(index, begin + HEAD.size, length + TAIL.size)
        example, (crc,) = record[:length], TAIL.unpack(record[length:])
        if masked_crc32c(example) != crc:
            raise UserError(f"{self.name(index)} is damaged: its bytes are not those of its checksum; {_AGAIN}")
        self._sound[index] = 1
        at = place - begin - HEAD.size
        return example[at : at + int(self._lengths[index])]

    def _record(self, index: int) -> int:
        return int(self._offsets[index] - self._before[index])


def open_tfrecord(root: Path, split: str, files: Sequence[Path], training: Sequence[Path] = ()) -> Shards:
    """Open the images of a ``split`` in ``files``.

    Stored labels begin at 0, or at 1 as in TensorFlow's scripts, where 0 is a background; those of the ``training``
    files decide, or of ``files`` without them. The class names are those in ``classes.txt``, else the records' synsets
    if they have any, else the stored labels.

    Raises:
        UserError: A shard is damaged, or its labels can be read in two ways or none.
    """
    index = _open(root, split, files)
    deciding = _open(root, "train", training) if training and split != "train" else index
    synsets = {(label, synset) for of in (index, deciding) for label, synset in of.about["synsets"]}
    if not len(synsets) == len(dict(synsets)) == len({synset for _, synset in synsets}):
        raise UserError(f"{root}: a label goes with two synsets, or a synset with two labels; make the records again")
    classes, first = _numbering(root, deciding, dict(synsets))
    if first and deciding is index and os.environ.get("RANK", "0") == "0":
        last = len(classes)
        print(f"labels in {root} run from 1 to {last}, as in TensorFlow's scripts; 1 is class 0", file=sys.stderr)
    labels = index.columns["labels"] - first
    for label in (labels.min(), labels.max()):
        if not 0 <= label < len(classes):
            raise UserError(
                f"{root}: the {split} split has the label {label + first}, of none of the {len(classes)} classes; both "
                "splits, and classes.txt, must know the same"
            )
    return RecordShards(files, index, labels, classes)


def _numbering(root: Path, index: Index, synsets: Mapping[int, str]) -> tuple[list[str], int]:
    """Return the class names, and the label of the first, by the ``index`` of the split that decides."""
    written, named = index.columns["labels"], read_classes(root)
    low, high, different = int(written.min()), int(written.max()), len(np.unique(written))
    count = len(named) if named else different
    first = 0 if low == 0 else 1
    if high >= count + first or (low > 0 and high < count):
        raise UserError(
            f"{root}: labels run from {low} to {high} and {different} of them occur"
            + (f", where classes.txt names {count}" if named else "")
            + ", so that nobody knows which class is which; name all in classes.txt, in the order of labels"
        )
    return named or [synsets.get(label, str(label)) for label in range(first, count + first)], first


def check_record_file(shard: Path) -> None:
    """Raise UserError if ``shard`` does not begin with a record."""
    with shard.open("rb") as file:
        head = file.read(HEAD.size)
    refuse_compressed(head, str(shard))
    if head and (len(head) < HEAD.size or masked_crc32c(head[:8]) != HEAD.unpack(head)[1]):
        raise UserError(f"{shard}: record 0 at byte 0 is damaged, or this is no TFRecord file; {_AGAIN}")


def _open(root: Path, split: str, files: Sequence[Path]) -> Index:
    kind = Kind("records", COLUMNS)
    return load_or_build_index(root, split, kind, files, lambda: _index(root, split, files))


def _index(root: Path, split: str, files: Sequence[Path]) -> Index:
    found = list(map_in_order(_records, files))
    if not any(found):
        raise UserError(f"{root}: there is no record in the {len(files)} file(s) of the {split} split")
    synsets = sorted({(row[3], synset) for records in found for row, synset in records if synset})
    return Index({"synsets": synsets}, columns_of([[row for row, _ in records] for records in found]))


def _records(shard: Path) -> list[Record]:
    """Return the records of a shard, in their order."""
    found: list[Record] = []
    with shard.open("rb", buffering=0) as file:
        size, fetch = os.fstat(file.fileno()).st_size, _Window(file.fileno())
        at = 0
        while at < size:
            where = f"{shard}: record {len(found)} at byte {at}"
            head = fetch(at, at + HEAD.size)
            length, crc = HEAD.unpack(head) if len(head) == HEAD.size else (0, -1)
            if at == 0:
                refuse_compressed(head, str(shard))
            if crc >= 0 and masked_crc32c(head[:8]) != crc:
                raise UserError(f"{where} is damaged, or this is no TFRecord file; {_AGAIN}")
            begin, end = at + HEAD.size, at + HEAD.size + length
            if crc < 0 or end + TAIL.size > size:
                raise UserError(f"{where} is not whole: the file ends at byte {size}; {_AGAIN}")
            try:
                found.append(_record(fetch, at, (begin, end)))
            except ValueError as error:
                raise UserError(f"{where} cannot be trained on: {error}") from None
            at = end + TAIL.size
    return found


def _record(fetch: _Window, at: int, example: Span) -> Record:
    """Return the record of one Example. Raises ValueError with what is wrong, and the fix."""
    try:
        features = find_features(fetch, example, (*_IMAGES, *_LABELS, _SYNSET))
    except ValueError as error:
        raise ValueError(f"it is no Example ({error}); {_AGAIN}") from None
    encoded, label = (next((features[name] for name in names if name in features), []) for names in (_IMAGES, _LABELS))
    match encoded, label:
        case [[(int(begin), int(end))], [int(number)]] if 0 <= number < 1 << 31:
            pass
        case [[(int(), int())], [int(number)]]:
            raise ValueError(f"its label is {number}; labels run from 0 or 1 on")
        case _:
            raise ValueError(f"it has not one {_IMAGES[0]} and one {_LABELS[0]}; write them as TensorFlow's scripts do")
    synset = features.get(_SYNSET, [])
    name = os.fsdecode(fetch(*synset[0])) if synset and not isinstance(synset[0], int) else ""
    return (begin, end - begin, begin - at, number), name


class _Window:
    """A file's bytes, read some hundreds at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begin = 0
        self._content = b""

    def __call__(self, begin: int, end: int) -> bytes:
        at = begin - self._begin
        if at < 0 or end > self._begin + len(self._content):
            self._begin, at = begin, 0
            self._content = os.pread(self._descriptor, max(end - begin, _WINDOW), begin)
        return self._content[at : end - self._begin]


def find_features(fetch: Fetch, example: Span, wanted: Collection[str]) -> dict[str, list[Span | int]]:
    """Return the values of those ``wanted`` features that an Example has, by name.

    They are a list for each: the span of a bytes value, or the integer itself.

    Raises:
        ValueError: The bytes are not an Example.
    """
    found: dict[str, list[Span | int]] = {}
    for features in _messages(fetch, example, 1):
        for entry in _messages(fetch, features, 1):
            keys, values = list(_messages(fetch, entry, 1)), list(_messages(fetch, entry, 2))
            if keys and values and keys[-1][1] - keys[-1][0] <= _LONGEST_KEY:
                key = fetch(*keys[-1]).decode(errors="replace")
                if key in wanted:
                    found[key] = list(_values(fetch, values[-1]))
    return found


def _values(fetch: Fetch, feature: Span) -> Iterator[Span | int]:
    """Yield the values of a Feature: from a BytesList (field 1) or an Int64List (field 3)."""
    for bytes_list in _messages(fetch, feature, 1):
        yield from _messages(fetch, bytes_list, 1)
    for int64_list in _messages(fetch, feature, 3):
        for number, value in _fields(fetch, int64_list):
            match number, value:
                case 1, int():
                    yield _signed(value)
                case 1, (at, end):  # several integers packed in one field
                    while at < end:
                        packed, at = _varint(fetch, at, end)
                        yield _signed(packed)


def _messages(fetch: Fetch, around: Span, wanted: int) -> Iterator[Span]:
    """Yield the spans of fields with the number ``wanted`` that hold bytes or messages."""
    for number, value in _fields(fetch, around):
        if number == wanted and not isinstance(value, int):
            yield value


def _fields(fetch: Fetch, message: Span) -> Iterator[tuple[int, Span | int]]:
    at, end = message
    while at < end:
        tag, at = _varint(fetch, at, end)
        value: Span | int
        match tag & 7:
            case 0:
                value, at = _varint(fetch, at, end)
            case 1 | 5 as wire:
                value = (at, at + (8 if wire == 1 else 4))
                at = value[1]
            case 2:
                length, at = _varint(fetch, at, end)
                value = (at, at + length)
                at += length
            case wire:
                raise ValueError(f"a field of type {wire}")
        if at > end:
            raise ValueError("a field that is longer than its message")
        yield tag >> 3, value


def _varint(fetch: Fetch, at: int, end: int) -> tuple[int, int]:
    """Return an integer and the offset of its end. It is stored as 7 bits per byte, the lowest first."""
    number = 0
    for place, byte in enumerate(fetch(at, min(at + 10, end))):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("a number that does not end")


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)
