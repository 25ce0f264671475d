"""The bytes are those that docs/wal-format.md shows."""

import re
from pathlib import Path

import pytest

from harness.memory_files import MemoryFiles
from kvplane.metastore.v1 import log_pb2, metastore_pb2
from kvplane_common.metastore import delete_prefix, put
from kvplane_metastore import format as wal_format
from kvplane_metastore.engine import replay
from kvplane_metastore.store import Store
from kvplane_metastore.wal import LOG_NAME, open_wal

PAGE = Path(__file__).parents[2] / "docs" / "wal-format.md"
SALT = bytes(range(8))


def commit(revision: int, *operations: metastore_pb2.Operation) -> bytes:
    batch = log_pb2.Batch(revision=revision, operations=operations)
    return log_pb2.Commit(batches=[batch]).SerializeToString()


def test_the_example_of_the_page_is_what_the_code_writes() -> None:
    lines = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)", PAGE.read_text(), re.MULTILINE)
    files = MemoryFiles()
    wal = open_wal(files, SALT, lambda payload: None).wal
    wal.append(commit(1, put(b"/node/a", b"up")))
    wal.append(commit(2, delete_prefix(b"/node/")))
    assert files.synced[LOG_NAME] == bytes.fromhex("".join(lines))
    assert wal.size_bytes == len(files.synced[LOG_NAME])


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert f"{wal_format.FILE_HEADER_BYTES} bytes, once" in page
    assert f"`{wal_format.MAGIC.decode()}`" in page
    assert f"`{wal_format.MARKER.hex(' ')}`" in page
    assert f"1 byte to {wal_format.MAX_PAYLOAD_BYTES >> 20} MiB" in page
    assert f"| {wal_format.FRAME_HEADER_BYTES} | | the payload |" in page


@pytest.mark.parametrize("size_bytes", [0, wal_format.MAX_PAYLOAD_BYTES + 1])
def test_a_frame_has_a_payload_within_its_limit(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"not {size_bytes}"):
        wal_format.frame(bytes(size_bytes), SALT, 20)


def test_a_later_format_is_named() -> None:
    later = b"KVPLWAL2" + SALT
    header = later + wal_format.crc32c(later).to_bytes(4, "little")
    with pytest.raises(ValueError, match="format 2 is not known"):
        wal_format.read_file_header(header)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff\xff", "holds no commit"),
        (commit(2, put(b"k", b"")), "revision 2 follows revision 0"),
        (commit(0, put(b"k", b"")), "revision 0 follows revision 0"),
    ],
    ids=["no protobuf", "a revision is missing", "a revision comes again"],
)
def test_a_payload_that_cannot_follow_is_refused(payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replay(Store(), payload)
