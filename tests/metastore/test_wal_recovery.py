"""What a log recovers from, and what it refuses."""

from collections.abc import Callable

import pytest

from harness.memory_files import MemoryFiles
from kvplane_metastore.format import FILE_HEADER_BYTES, FRAME_HEADER_BYTES, frame
from kvplane_metastore.wal import LOG_NAME, LogDamagedError, Recovered, open_wal

SALT = b"saltsalt"
PAYLOADS = [b"first", b"second", b"third payload"]
FIRST = FILE_HEADER_BYTES
SECOND = FIRST + FRAME_HEADER_BYTES + len(PAYLOADS[0])
THIRD = SECOND + FRAME_HEADER_BYTES + len(PAYLOADS[1])
END = THIRD + FRAME_HEADER_BYTES + len(PAYLOADS[2])

Corrupt = Callable[[bytes], bytes]


def opened(files: MemoryFiles) -> tuple[Recovered, list[bytes]]:
    payloads: list[bytes] = []
    return open_wal(files, SALT, payloads.append), payloads


def a_log(*payloads: bytes) -> MemoryFiles:
    files = MemoryFiles()
    recovered, _ = opened(files)
    for payload in payloads:
        recovered.wal.append(payload)
    return files


def corrupted(corrupt: Corrupt) -> MemoryFiles:
    files = a_log(*PAYLOADS)
    files.live[LOG_NAME] = corrupt(files.live[LOG_NAME])
    return files


def flipped(at: int, bit: int = 0) -> Corrupt:
    return lambda data: data[:at] + bytes((data[at] ^ (1 << bit),)) + data[at + 1 :]


def zeroed(start: int, end: int) -> Corrupt:
    return lambda data: data[:start] + bytes(end - start) + data[end:]


def cut(size_bytes: int) -> Corrupt:
    return lambda data: data[:size_bytes]


TORN: dict[str, tuple[Corrupt, int, int]] = {
    # a sentence: (what happened to the bytes, payloads that survive, bytes that are dropped)
    "an undamaged log is read whole": (lambda data: data, 3, 0),
    "the last byte did not arrive": (cut(END - 1), 2, END - 1 - THIRD),
    "only half of the last header arrived": (cut(THIRD + 8), 2, 8),
    "one byte of the last frame arrived": (cut(THIRD + 1), 2, 1),
    "nothing of the last frame arrived": (cut(THIRD), 2, 0),
    "a bit of the last payload is wrong": (flipped(END - 3), 2, END - THIRD),
    "the last length is wrong": (flipped(THIRD + 4), 2, END - THIRD),
    "the last payload is zeros": (zeroed(THIRD + FRAME_HEADER_BYTES, END), 2, END - THIRD),
    "the last frame is zeros": (zeroed(THIRD, END), 2, END - THIRD),
    "zeros follow the last frame": (lambda data: data + bytes(4096), 3, 4096),
    "less than a header of zeros follows": (lambda data: data + bytes(3), 3, 3),
    "noise follows the last frame": (lambda data: data + b"\xf5kvf noise" * 9, 3, 90),
    "a copy of an older frame follows": (lambda data: data + data[FIRST:SECOND], 3, SECOND - FIRST),
    "a log without frames": (cut(FIRST), 0, 0),
    "a log whose only frame is torn": (cut(FIRST + 9), 0, 9),
}


@pytest.mark.parametrize(("corrupt", "survivors", "dropped"), TORN.values(), ids=TORN.keys())
def test_a_torn_tail_is_dropped_and_reported(
    corrupt: Corrupt, survivors: int, dropped: int
) -> None:
    files = corrupted(corrupt)
    before = files.live[LOG_NAME]

    recovered, payloads = opened(files)

    assert payloads == PAYLOADS[:survivors]
    assert recovered.dropped_tail_bytes == dropped
    assert files.synced[LOG_NAME] == before[: len(before) - dropped]
    kept = [data for name, data in files.synced.items() if ".torn-" in name]
    assert kept == ([before[len(before) - dropped :]] if dropped else [])

    recovered.wal.append(b"one more")
    again, payloads = opened(files)
    assert payloads == [*PAYLOADS[:survivors], b"one more"]
    assert again.dropped_tail_bytes == 0


def swapped(data: bytes) -> bytes:
    return data[:FIRST] + data[SECOND:THIRD] + data[FIRST:SECOND] + data[THIRD:]


DAMAGED: dict[str, tuple[Corrupt, int]] = {
    # a sentence: (what happened to the bytes, the offset that the refusal names)
    "a bit of the first payload is wrong": (flipped(SECOND - 1), FIRST),
    "a bit of a payload in the middle is wrong": (flipped(THIRD - 1), SECOND),
    "a length in the middle is too large": (flipped(SECOND + 4, 5), SECOND),
    "a length in the middle reaches past the end": (flipped(SECOND + 6, 7), SECOND),
    "a length in the middle is zero": (zeroed(SECOND + 4, SECOND + 8), SECOND),
    "a frame in the middle is zeros": (zeroed(SECOND, THIRD), SECOND),
    "two frames are zeros and one follows": (zeroed(FIRST, THIRD), FIRST),
    "two frames have changed places": (swapped, FIRST),
    "damage in the middle and a torn tail": (lambda data: flipped(FIRST)(data)[:-1], FIRST),
    "the file is empty": (cut(0), 0),
    "the file's header is cut": (cut(FILE_HEADER_BYTES - 1), 0),
    "the salt is wrong": (flipped(10), 0),
    "the file is something else": (lambda data: b"some other file of that length", 0),
}


@pytest.mark.parametrize(("corrupt", "offset"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_log_is_refused_and_left_alone(corrupt: Corrupt, offset: int) -> None:
    files = corrupted(corrupt)
    before = dict(files.live)

    with pytest.raises(LogDamagedError, match=f"{LOG_NAME} is damaged at byte {offset}: ") as told:
        opened(files)

    assert told.value.offset == offset
    assert "restore it from a backup" in str(told.value)
    assert files.live == before


def test_every_cut_keeps_exactly_the_whole_frames() -> None:
    for size_bytes in range(FIRST, END + 1):
        recovered, payloads = opened(corrupted(cut(size_bytes)))
        whole = sum(end <= size_bytes for end in (SECOND, THIRD, END))
        assert payloads == PAYLOADS[:whole]
        assert recovered.dropped_tail_bytes == size_bytes - (FIRST, SECOND, THIRD, END)[whole]


def test_every_flipped_bit_before_the_last_frame_is_refused() -> None:
    for at in range(THIRD):
        for bit in range(8):
            with pytest.raises(LogDamagedError):
                opened(corrupted(flipped(at, bit)))


def test_a_torn_frame_that_holds_the_bytes_of_a_log_is_still_torn() -> None:
    a_whole_log = a_log(*PAYLOADS).live[LOG_NAME]
    foreign = frame(b"from another log", b"othrsalt", SECOND + FRAME_HEADER_BYTES)
    files = a_log(b"first", foreign + a_whole_log)
    files.live[LOG_NAME] = files.live[LOG_NAME][:-1]

    recovered, payloads = opened(files)

    assert payloads == [b"first"]
    assert recovered.dropped_tail_bytes == FRAME_HEADER_BYTES + len(foreign + a_whole_log) - 1


def test_a_frame_far_behind_the_damage_is_found() -> None:
    for size_bytes in range((1 << 20) - 40, (1 << 20) + 8, 5):
        files = a_log(b"first", b"x" * size_bytes, b"last")
        files.live[LOG_NAME] = flipped(SECOND)(files.live[LOG_NAME])
        with pytest.raises(LogDamagedError, match=f"byte {SECOND}"):
            opened(files)


def test_a_payload_that_makes_no_sense_is_refused_with_its_offset() -> None:
    def replay(payload: bytes) -> None:
        if payload == PAYLOADS[1]:
            raise ValueError("revision 9 follows revision 1")

    with pytest.raises(LogDamagedError, match="revision 9 follows") as told:
        open_wal(a_log(*PAYLOADS), SALT, replay)
    assert told.value.offset == SECOND


def test_what_a_killed_process_left_is_synced_before_it_is_served() -> None:
    files = a_log(b"first")
    recovered, _ = opened(files)
    files.fail_in = 1
    with pytest.raises(OSError, match="refused"):
        recovered.wal.append(b"never synced")
    files.fail_in = None

    _, payloads = opened(files)

    assert payloads == [b"first", b"never synced"]
    assert files.synced[LOG_NAME] == files.live[LOG_NAME]


def test_after_a_failure_the_log_takes_nothing_more() -> None:
    files = a_log()
    recovered, _ = opened(files)
    files.fail_in = 0
    with pytest.raises(OSError, match="refused"):
        recovered.wal.append(b"first")
    files.fail_in = None
    with pytest.raises(OSError, match="after a restart"):
        recovered.wal.append(b"second")


def test_a_crash_between_keeping_a_tail_and_cutting_it_repeats_the_repair() -> None:
    files = corrupted(cut(END - 1))
    files.synced = dict(files.live)
    files.fail_in = 1
    with pytest.raises(OSError, match="refused"):
        opened(files)
    files.crash()

    recovered, payloads = opened(files)

    assert payloads == PAYLOADS[:2]
    assert recovered.dropped_tail_bytes == END - 1 - THIRD
    assert len([name for name in files.live if ".torn-" in name]) == 1
