"""The real files."""

import errno
import os
from pathlib import Path

import pytest

from kvplane_metastore.files import locked
from kvplane_metastore.wal import LOG_NAME, open_wal

SALT = b"saltsalt"


def test_a_log_on_the_disk_survives_a_torn_tail(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "data"
    with locked(directory) as files:
        wal = open_wal(files, SALT, lambda payload: None).wal
        wal.append(b"first")
        wal.append(b"second")
    log = directory / LOG_NAME
    log.write_bytes(log.read_bytes()[:-1])
    with locked(directory) as files:
        payloads: list[bytes] = []
        recovered = open_wal(files, SALT, payloads.append)
        assert payloads == [b"first"]
        recovered.wal.append(b"third")
    with locked(directory) as files:
        payloads = []
        assert open_wal(files, SALT, payloads.append).dropped_tail_bytes == 0
        assert payloads == [b"first", b"third"]
    kept = [path for path in directory.iterdir() if ".torn-" in path.name]
    assert [path.stat().st_size for path in kept] == [recovered.dropped_tail_bytes]


def test_what_a_crash_left_of_a_log_in_the_making_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f"{LOG_NAME}.new").write_bytes(b"half a hea")
    with locked(tmp_path) as files:
        open_wal(files, SALT, lambda payload: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", LOG_NAME]


def test_a_directory_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(OSError, match=f"{tmp_path} is in use by another metastore"),
        locked(tmp_path),
    ):
        raise AssertionError
    with locked(tmp_path) as files:
        assert files.read(LOG_NAME, 0, 1) is None


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with locked(tmp_path) as files:
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match=r"cannot write 3 bytes to .*log: No space left"):
            files.publish("log", b"abc")
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}
