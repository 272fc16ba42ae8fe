"""TFRecord shards: each record is an Example with an image and a label, as TensorFlow's ImageNet scripts write it.

A record is its length (uint64), the masked CRC-32C of the length (uint32), the Example, and the masked CRC-32C of the
Example (uint32), all little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import google_crc32c

from imagenet_fast.data.archives import refuse_compressed
from imagenet_fast.data.index import Kind
from imagenet_fast.data.pixels import Fetch, ImageDecodeError, size_by_header
from imagenet_fast.data.shards import COLUMNS, Looked, Row, Shards, class_names, fetch_from, indexes_of
from imagenet_fast.errors import UserError

HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")

_IMAGES = ("image/encoded", "image")  # in TensorFlow's scripts; in TensorFlow Datasets
_LABELS = ("image/class/label", "label")
_SYNSET = "image/class/synset"
_BUFFER = 512  # bytes read at once
_LARGEST = 1 << 31
_AGAIN = "copy or make it again"
_MASK = 0xA282EAD8
_LONGEST_KEY = 256
_RECORDS = Kind("records", COLUMNS)

Span = tuple[int, int]
"""Offsets in the file: the first byte, and the end (exclusive)."""


def masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of ``content``, masked as TensorFlow does."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class RecordShards(Shards):
    """One split in TFRecord shards."""

    def name(self, index: int) -> str:
        """Return the shard and the offset of the record."""
        return f"{self.files[self._shards[index]]}: record at byte {self._offsets[index] - self._before[index]}"

    def read(self, index: int) -> bytes:
        """Return image ``index``, still encoded. Raises ImageDecodeError if the record is damaged."""
        place, before = int(self._offsets[index]), int(self._before[index])
        length, _ = HEAD.unpack(self.read_at(index, place - before, HEAD.size))
        at, end = before - HEAD.size, before - HEAD.size + int(self._lengths[index])
        if end <= length < _LARGEST:
            record = self.read_at(index, place - at, length + TAIL.size)
            if masked_crc32c(record[:length]) == TAIL.unpack(record[length:])[0]:
                return record[at:end]
        raise ImageDecodeError("its bytes are not those of its checksum")


def open_tfrecord(root: Path, split: str, files: Sequence[Path], training: Sequence[Path] = ()) -> Shards:
    """Open the images of a ``split`` in ``files``.

    Stored labels begin at 0, or at 1 as in TensorFlow's scripts, where 0 is a background; the training split decides,
    if there is one. Raises UserError if they can be read in two ways.
    """
    index, deciding = indexes_of(root, split, _RECORDS, files, training, _records)
    synsets = {(label, synset) for of in (index, deciding) for label, synset in of.about["synsets"]}
    if not len(synsets) == len(dict(synsets)) == len({synset for _, synset in synsets}):
        raise UserError(f"{root}: a label goes with two synsets, or a synset with two labels; make the records again")
    written = deciding.columns["labels"]
    first, last = min(1, int(written.min())), int(written.max())
    classes = class_names(root, written, first, dict(synsets))
    if first and last < len(classes):
        raise UserError(
            f"{root}: labels run from {written.min()} to {last}, where classes.txt names {len(classes)}, and nobody "
            "knows whether the first is 0 or 1; make records in which the first class or the last one occurs"
        )
    if first and deciding is index and os.environ.get("RANK", "0") == "0":
        print(f"labels in {root} run from 1 to {last}, as in TensorFlow's scripts; 1 is class 0", file=sys.stderr)
    return RecordShards(files, index, index.columns["labels"] - first, classes)


def _records(shard: Path) -> Looked:
    rows: list[Row] = []
    synsets: set[tuple[int, str]] = set()
    with shard.open("rb", buffering=_BUFFER) as file:
        size, fetch = os.fstat(file.fileno()).st_size, fetch_from(file)
        at = 0
        while at < size:
            where = f"{shard}: record {len(rows)} at byte {at}"
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
                row, synset = _record(fetch, at, (begin, end))
            except ValueError as error:
                raise UserError(f"{where} cannot be trained on: {error}") from None
            rows.append(row)
            synsets |= {(row[3], synset)} if synset else set()
            at = end + TAIL.size
    return rows, synsets


def _record(fetch: Fetch, at: int, example: Span) -> tuple[Row, str]:
    """Return the row and the synset, if any, of an Example. Raises ValueError with what is wrong, and the fix."""
    try:
        features = find_features(fetch, example, (*_IMAGES, *_LABELS, _SYNSET))
    except ValueError as error:
        raise ValueError(f"it is no Example ({error}); {_AGAIN}") from None
    encoded, label = (next((features[name] for name in names if name in features), []) for names in (_IMAGES, _LABELS))
    match encoded, label:
        case [[(int(begin), int(end))], [int(number)]] if number < 1 << 31:
            pass
        case [[(int(), int())], [int(number)]]:
            raise ValueError(f"its label is {number - (number >> 63 << 64)}; labels run from 0 or 1 on")
        case _:
            raise ValueError(f"it has not one {_IMAGES[0]} and one {_LABELS[0]}; write them as TensorFlow's scripts do")
    synset = features.get(_SYNSET, [])
    name = os.fsdecode(fetch(*synset[0])) if synset and not isinstance(synset[0], int) else ""
    return (begin, end - begin, begin - at, number, *size_by_header(fetch, begin, end)), name


def find_features(fetch: Fetch, example: Span, wanted: Collection[str]) -> dict[str, list[Span | int]]:
    """Return the values of those ``wanted`` features that an Example has, by name. Raises ValueError if it is none.

    They are a list for each: the span of a bytes value, or the integer itself.
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
                    yield value
                case 1, (at, end):  # several integers packed in one field
                    while at < end:
                        packed, at = _varint(fetch, at, end)
                        yield packed


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
