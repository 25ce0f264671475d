"""The bytes of the log. No I/O; docs/wal-format.md tells the same in words.

A log is a file header and then frames, one for each fsync. The checksum of a frame's header
covers the file's salt and the frame's offset beside the header itself. So a header counts only in
the file and at the place it was written for, and a value that happens to hold the bytes of a log
is never taken for one. That lets recovery ask a sharp question: does a frame begin anywhere after
this damage?
"""

import struct
from typing import NamedTuple

import google_crc32c

MAGIC = b"KVPLWAL1"
"""First bytes of a log. The last digit is the version of the format."""
MARKER = b"\xf5kvf"
"""First bytes of a frame; 0xf5 occurs in no UTF-8 text."""
SALT_BYTES = 8
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
"""Largest payload that a frame may have: above any group commit."""

_FILE_HEADER = struct.Struct("<8s8sI")  # magic, salt, CRC32C of both
_FRAME_HEADER = struct.Struct("<4sIII")  # marker, payload bytes, payload's CRC32C, header's CRC32C
_PLACE = struct.Struct("<8sQ4sII")  # what the header's checksum covers: salt, offset, the rest

FILE_HEADER_BYTES = _FILE_HEADER.size
FRAME_HEADER_BYTES = _FRAME_HEADER.size


class FrameHeader(NamedTuple):
    """What a frame says of its payload."""

    payload_bytes: int
    payload_crc: int

    def fits(self, payload: bytes) -> bool:
        """Tell whether `payload` is whole and undamaged."""
        return len(payload) == self.payload_bytes and crc32c(payload) == self.payload_crc


def crc32c(data: bytes) -> int:
    """Return the CRC32C of `data`."""
    return int(google_crc32c.value(data))


def file_header(salt: bytes) -> bytes:
    """Return the first bytes of a new log. `salt` is random, SALT_BYTES long."""
    return _FILE_HEADER.pack(MAGIC, salt, crc32c(MAGIC + salt))


def read_file_header(data: bytes) -> bytes:
    """Return the salt. Raises ValueError if these are not the first bytes of a log."""
    if len(data) != FILE_HEADER_BYTES:
        raise ValueError(f"it has {len(data)} bytes, less than a log's header")
    magic, salt, crc = _FILE_HEADER.unpack(data)
    if magic[:-1] != MAGIC[:-1]:
        raise ValueError("it is not a log of the metastore")
    if crc != crc32c(magic + salt):
        raise ValueError("its header is damaged")
    if magic != MAGIC:
        raise ValueError(f"its format {magic[-1:].decode(errors='replace')} is not known here")
    return bytes(salt)


def frame(payload: bytes, salt: bytes, offset: int) -> bytes:
    """Return the frame of `payload` for that offset of the file with that salt.

    Raises ValueError for an empty payload or one over MAX_PAYLOAD_BYTES.
    """
    if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame holds 1 to {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
    header = FrameHeader(len(payload), crc32c(payload))
    return _FRAME_HEADER.pack(MARKER, *header, _header_crc(header, salt, offset)) + payload


def read_frame_header(data: bytes, salt: bytes, offset: int) -> FrameHeader | None:
    """Return what the first bytes of `data` say, or None if no frame begins there."""
    if len(data) < FRAME_HEADER_BYTES:
        return None
    marker, payload_bytes, payload_crc, crc = _FRAME_HEADER.unpack_from(data)
    header = FrameHeader(payload_bytes, payload_crc)
    if marker != MARKER or not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        return None
    return header if crc == _header_crc(header, salt, offset) else None


def find_frame(data: bytes, salt: bytes, offset: int) -> int | None:
    """Return the first offset in the file at which a frame begins within `data`, or None.

    `offset` is that of the first byte of `data`.
    """
    at = data.find(MARKER)
    while at >= 0:
        header = data[at : at + FRAME_HEADER_BYTES]
        if read_frame_header(header, salt, offset + at) is not None:
            return offset + at
        at = data.find(MARKER, at + 1)
    return None


def _header_crc(header: FrameHeader, salt: bytes, offset: int) -> int:
    return crc32c(_PLACE.pack(salt, offset, MARKER, *header))
