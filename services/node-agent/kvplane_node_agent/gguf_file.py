"""The metadata at the head of a GGUF file, without its vocabulary.

A model of today has 150 000 tokens and as many merges. They are stepped over here: reading them
into objects takes seconds, in which the agent would answer nobody.
"""

import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
"""struct format of each number type, by its id in the file."""
_STRING, _ARRAY = 8, 9
_MAX_KEPT = 4096
"""Longest array of numbers that is kept: one number a layer is, one a token is not."""
_MAX_STRING_BYTES = 1 << 24

Value = int | float | str | list[int | float]


def read_metadata(path: Path) -> dict[str, Value]:
    """Return the metadata of a GGUF file, without arrays of strings and long arrays of numbers.

    Blocks: call it in a thread. Raises OSError if the file cannot be read, ValueError if it is not
    a GGUF file of a known version or is cut short.
    """
    with path.open("rb") as file:
        magic, version = file.read(4), _number(file, "<I")
        if magic != _MAGIC or version not in _VERSIONS:
            raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
        _number(file, "<Q")  # the count of tensors
        values: dict[str, Value] = {}
        for _ in range(int(_number(file, "<Q"))):
            key = _string(file)
            value = _value(file, int(_number(file, "<I")))
            if value is not None:
                values[key] = value
        return values


def _value(file: BinaryIO, kind: int) -> Value | None:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        return _array(file, int(_number(file, "<I")), int(_number(file, "<Q")))
    return _number(file, _format(kind))


def _array(file: BinaryIO, kind: int, count: int) -> list[int | float] | None:
    if kind == _STRING:
        for _ in range(count):
            file.seek(int(_number(file, "<Q")), 1)
        return None
    form = _format(kind)
    if count > _MAX_KEPT:
        file.seek(count * struct.calcsize(form), 1)
        return None
    return [_number(file, form) for _ in range(count)]


def _format(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"the metadata has a value of the unknown type {kind}")
    return _SCALARS[kind]


def _string(file: BinaryIO) -> str:
    length = int(_number(file, "<Q"))
    if length > _MAX_STRING_BYTES:
        raise ValueError(f"the metadata has a text of {length} bytes, over {_MAX_STRING_BYTES}")
    return _exactly(file, length).decode("utf-8", "replace")


def _number(file: BinaryIO, form: str) -> int | float:
    value: int | float = struct.unpack(form, _exactly(file, struct.calcsize(form)))[0]
    return value


def _exactly(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise ValueError("the metadata is cut short")
    return data
