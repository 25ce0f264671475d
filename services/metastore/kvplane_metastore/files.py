"""The seam between the log and the disk: five calls on files of one directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """Files of one directory, by name. Every call blocks, and raises OSError when it fails."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes | None:
        """Return up to `size_bytes` from `offset`, less only at the end; None without the file."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Make the file hold `data`: on disk, and all of it or none even in a crash."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Write `data` at the end. A crash may lose any part of it until `sync` has returned."""
        ...

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut the file to `size_bytes`; certain only after `sync`."""
        ...

    def sync(self, name: str) -> None:
        """Return once everything written to the file is on disk."""
        ...


class DiskFiles:
    """The real files of `directory`. Get one from `locked`, which also closes it."""

    def __init__(self, directory: Path, closing: ExitStack) -> None:
        self._directory = directory
        self._closing = closing
        self._descriptors: dict[str, int] = {}

    def read(self, name: str, offset: int, size_bytes: int) -> bytes | None:
        """Return up to `size_bytes` from `offset`; None without the file."""
        try:
            descriptor = self._open(name)
        except FileNotFoundError:
            return None
        parts = []
        while size_bytes and (part := os.pread(descriptor, size_bytes, offset)):
            parts.append(part)
            offset += len(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def publish(self, name: str, data: bytes) -> None:
        """Write a temporary file, then give it its name."""
        temporary = self._directory / f"{name}.new"
        try:
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                _write(descriptor, data)
                os.fsync(descriptor)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            what = f"cannot write {len(data)} bytes to {self._directory / name}"
            raise OSError(error.errno, f"{what}: {error.strerror}") from error
        temporary.rename(self._directory / name)
        _sync_directory(self._directory)

    def append(self, name: str, data: bytes) -> None:
        """Write `data` at the end."""
        _write(self._open(name), data)

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut the file to `size_bytes`."""
        os.ftruncate(self._open(name), size_bytes)

    def sync(self, name: str) -> None:
        """Return once the file is on disk."""
        os.fsync(self._open(name))

    def _open(self, name: str) -> int:
        if name not in self._descriptors:
            opened = _opened(self._directory / name, os.O_RDWR | os.O_APPEND)
            self._descriptors[name] = self._closing.enter_context(opened)
        return self._descriptors[name]


@contextmanager
def locked(directory: Path) -> Iterator[DiskFiles]:
    """Create `directory` where it is missing and hold it alone while the block runs.

    Raises OSError if another process holds it.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync_directory(path.parent)
    with ExitStack() as closing:
        lock = closing.enter_context(_opened(directory / "lock", os.O_RDWR | os.O_CREAT))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(
                f"{directory} is in use by another metastore; stop it, or give this one its own "
                "--data-dir"
            ) from error
        yield DiskFiles(directory, closing)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(directory: Path) -> None:
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
