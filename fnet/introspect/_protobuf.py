"""Reads fields of protocol buffers, such as the files of JAX's profiler, without their schemas."""

from __future__ import annotations

from collections.abc import Iterator


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields (field number, value) for each field of a protocol buffer message.

    The value of a length-delimited field, such as a string or a nested message, is a `memoryview`
    of its bytes. The value of any other field is an integer.

    Raises:
        ValueError: `data` is not a protocol buffer message.
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise ValueError(f"a protocol buffer has no fields of kind {kind}")
        if at > end:
            raise ValueError("a protocol buffer ends inside a field")
        yield tag >> 3, value


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns (the integer at the position `at`, the position after the integer)."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a protocol buffer ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def numbers(value: int | memoryview) -> list[int]:
    """Returns the integers of a repeated protocol buffer field, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        found.append(number)
    return found


def text(value: int | memoryview) -> str:
    return bytes(value).decode(errors="replace")
