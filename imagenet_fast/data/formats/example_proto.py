"""Find the values of features in TensorFlow's ``Example`` messages by file offset, and write such messages.

Only what is wanted is read, by offset: an image is a hundred times as long as the rest of its message. The encoding is
protobuf's (https://protobuf.dev/programming-guides/encoding/). The messages are those of TensorFlow's ``example.proto``
and ``feature.proto``.

The input may be any bytes. What is not a message raises ValueError, and so does a length that exceeds its container.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

Span = tuple[int, int]
"""Offsets in the file: the first byte, and the end (exclusive)."""

Fetch = Callable[[int, int], bytes]
"""A function that returns the file's bytes from one offset to another."""

_LONGEST_KEY = 256


def find_features(fetch: Fetch, example: Span, wanted: Collection[str]) -> dict[str, list[Span | int]]:
    """Return the values of those ``wanted`` features that the Example has.

    Args:
        fetch: Returns the file's bytes from one offset to another.
        example: The span of the Example in the file.
        wanted: Names of features.

    Returns:
        A list of values by feature name: the span of each bytes value, or the integer itself.

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


def write_example(features: Mapping[str, bytes | int]) -> bytes:
    """Return an encoded Example with one value per feature, in the order given."""
    entries = b""
    for key, value in features.items():
        if isinstance(value, int):
            feature = _message(3, _message(1, _number(value)))
        else:
            feature = _message(1, _message(1, value))
        entries += _message(1, _message(1, key.encode()) + _message(2, feature))
    return _message(1, entries)


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


def _message(number: int, content: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(content)) + content


def _number(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    written = b""
    while number > 0x7F:
        written += bytes([number & 0x7F | 0x80])
        number >>= 7
    return written + bytes([number])
