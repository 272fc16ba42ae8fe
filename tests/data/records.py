"""TFRecords, as TensorFlow's scripts write them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from imagenet_fast.data.prepare.write import Sample, write_classes
from imagenet_fast.data.source import ImageSource, open_training, open_validation
from imagenet_fast.data.tfrecord import HEAD, TAIL, masked_crc32c


def samples_of(images: ImageSource) -> list[Sample]:
    return [Sample(images.name(i), images.read(i), int(images.labels[i])) for i in range(len(images))]


def split_into(samples: Sequence[Sample], in_each: int) -> list[Sequence[Sample]]:
    return [samples[begin : begin + in_each] for begin in range(0, len(samples), in_each)]


def in_records(folder: Path, out: Path, in_each: int = 4) -> Path:
    """The images of class folders, in ``out``, so many in each file."""
    for split, images in (("train", open_training(folder)), ("validation", open_validation(folder))):
        write_classes(out, images.classes)
        shards = split_into(samples_of(images), in_each)
        for number, samples in enumerate(shards):
            write_records(out / f"{split}-{number:05}-of-{len(shards):05}", samples, images.classes)
    return out


def write_records(path: Path, samples: Iterable[Sample], classes: Sequence[str]) -> None:
    records_of(
        path,
        *(
            example(
                {
                    "image/class/label": sample.label + 1,
                    "image/class/synset": os.fsencode(classes[sample.label]),
                    "image/encoded": sample.encoded,
                }
            )
            for sample in samples
        ),
    )


def records_of(path: Path, *examples: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for content in examples:
            head = len(content).to_bytes(8, "little")
            file.write(HEAD.pack(len(content), masked_crc32c(head)) + content + TAIL.pack(masked_crc32c(content)))
    return path


def example(features: dict[str, bytes | int]) -> bytes:
    """An encoded Example with one value per feature, in this order."""
    entries = b""
    for key, value in features.items():
        kind, content = (3, _number(value)) if isinstance(value, int) else (1, value)
        feature = _message(kind, _message(1, content))
        entries += _message(1, _message(1, key.encode()) + _message(2, feature))
    return _message(1, entries)


def _message(number: int, content: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(content)) + content


def _number(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    written = b""
    while number > 0x7F:
        written += bytes([number & 0x7F | 0x80])
        number >>= 7
    return written + bytes([number])
