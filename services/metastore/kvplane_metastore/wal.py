"""The log on disk: opened by replaying it, then only appended to.

Recovery meets two kinds of bad bytes. *Torn*: the process or the machine died while the last frame
was being written. Nobody was told that it is durable, so it is dropped. *Damaged*: anything else,
and then acknowledged writes are at stake, so the log is refused. They are told apart by what
follows. A frame is begun only after the one before it is on disk, so where a frame begins after
the bad bytes, the bad bytes were once good.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvplane_metastore import format as wal_format
from kvplane_metastore.files import Files

LOG_NAME = "metastore.log"

_SCAN_BYTES = 1024 * 1024

_log = structlog.get_logger(__name__)


class LogDamagedError(OSError):
    """The log has bytes that no crash explains; it must not be opened as if nothing were lost."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(
            f"{LOG_NAME} is damaged at byte {offset}: {why}. Acknowledged writes may be lost, so "
            "the store does not open. Copy the data directory, then restore it from a backup; or "
            "move the log away to begin empty, which the cluster survives: it forgets caches, "
            "sessions, and which nodes are drained"
        )
        self.offset = offset


@dataclass(frozen=True)
class Recovered:
    """A log that is ready, and how many bytes of an unfinished last write it lost."""

    wal: "Wal"
    dropped_tail_bytes: int


class Wal:
    """An open log. Not for more than one thread at a time."""

    def __init__(self, files: Files, salt: bytes, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._files = files
        self._salt = salt
        self._failed = False

    def append(self, payload: bytes) -> None:
        """Return once `payload` is on disk.

        Raises OSError when the disk refuses, and from then on always: what the file holds behind
        the last good frame is unknown, and after a failed fsync the kernel may have dropped it.
        """
        if self._failed:
            raise OSError(f"{LOG_NAME} failed before; it takes writes again after a restart")
        data = wal_format.frame(payload, self._salt, self.size_bytes)
        self._failed = True
        self._files.append(LOG_NAME, data)
        self._files.sync(LOG_NAME)
        self._failed = False
        self.size_bytes += len(data)


def open_wal(files: Files, new_salt: bytes, replay: Callable[[bytes], None]) -> Recovered:
    """Create the log, or give each payload in it to `replay` and make it ready for appending.

    `new_salt` is random and used for a new log only. `replay` raises ValueError for a payload that
    makes no sense. Raises LogDamagedError for damage, OSError when the disk refuses.
    """
    salt = _salt(files, new_salt)
    end, size_bytes = _replay(files, salt, replay)
    if end < size_bytes:
        _drop_tail(files, salt, end)
    # A frame written by a process that was killed before its fsync may be in the kernel's memory
    # only. It must be on disk before anybody reads it here.
    files.sync(LOG_NAME)
    return Recovered(Wal(files, salt, end), size_bytes - end)


def _salt(files: Files, new_salt: bytes) -> bytes:
    header = files.read(LOG_NAME, 0, wal_format.FILE_HEADER_BYTES)
    if header is None:
        files.publish(LOG_NAME, wal_format.file_header(new_salt))
        return new_salt
    try:
        return wal_format.read_file_header(header)
    except ValueError as error:
        raise LogDamagedError(0, str(error)) from error


def _replay(files: Files, salt: bytes, replay: Callable[[bytes], None]) -> tuple[int, int]:
    """Return where the last good frame ends, and where the file does."""
    offset = wal_format.FILE_HEADER_BYTES
    while (payload := _payload(files, salt, offset)) is not None:
        try:
            replay(payload)
        except ValueError as error:
            raise LogDamagedError(offset, str(error)) from error
        offset += wal_format.FRAME_HEADER_BYTES + len(payload)
    return offset, _size_bytes(files, offset)


def _payload(files: Files, salt: bytes, offset: int) -> bytes | None:
    data = _read(files, offset, wal_format.FRAME_HEADER_BYTES)
    header = wal_format.read_frame_header(data, salt, offset)
    if header is None:
        return None
    payload = _read(files, offset + wal_format.FRAME_HEADER_BYTES, header.payload_bytes)
    return payload if header.fits(payload) else None


def _size_bytes(files: Files, offset: int) -> int:
    while part := _read(files, offset, _SCAN_BYTES):
        offset += len(part)
    return offset


def _drop_tail(files: Files, salt: bytes, end: int) -> None:
    _refuse_a_frame_after(files, salt, end)
    tail = _read(files, end, _size_bytes(files, end) - end)
    # The name tells the bytes apart, so no two tails overwrite each other.
    kept_as = f"{LOG_NAME}.torn-{end}-{wal_format.crc32c(tail):08x}"
    files.publish(kept_as, tail)
    files.truncate(LOG_NAME, end)
    files.sync(LOG_NAME)
    _log.warning(
        "dropped an unfinished write", offset=end, dropped_bytes=len(tail), kept_as=kept_as
    )


def _refuse_a_frame_after(files: Files, salt: bytes, bad: int) -> None:
    # Chunks overlap by a header less one byte, so that none is cut in two.
    overlap_bytes = wal_format.FRAME_HEADER_BYTES - 1
    offset = bad + 1
    while len(part := _read(files, offset, _SCAN_BYTES)) > overlap_bytes:
        found = wal_format.find_frame(part, salt, offset)
        if found is not None:
            raise LogDamagedError(bad, f"no whole frame is there, but one begins at byte {found}")
        offset += len(part) - overlap_bytes


def _read(files: Files, offset: int, size_bytes: int) -> bytes:
    return files.read(LOG_NAME, offset, size_bytes) or b""
