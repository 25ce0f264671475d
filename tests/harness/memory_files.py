"""Files that lose what was not synced, and a disk that refuses when a test says so."""

import errno


class MemoryFiles:
    """Implements kvplane_metastore.files.Files.

    `live` is what a reader sees, `synced` what a crash leaves. Of the calls that change something,
    `fail_in` counts down to the one that fails, and all after it do too; None: none fails.
    """

    def __init__(self) -> None:
        self.live: dict[str, bytes] = {}
        self.synced: dict[str, bytes] = {}
        self.fail_in: int | None = None
        self.syncs = 0

    def read(self, name: str, offset: int, size_bytes: int) -> bytes | None:
        data = self.live.get(name)
        return None if data is None else data[offset : offset + size_bytes]

    def publish(self, name: str, data: bytes) -> None:
        self._count_down()
        self.live[name] = self.synced[name] = data

    def append(self, name: str, data: bytes) -> None:
        try:
            self._count_down()
        except OSError:
            self.live[name] += data[: len(data) // 2]
            raise
        self.live[name] += data

    def truncate(self, name: str, size_bytes: int) -> None:
        self._count_down()
        self.live[name] = self.live[name][:size_bytes]

    def sync(self, name: str) -> None:
        self._count_down()
        self.syncs += 1
        self.synced[name] = self.live[name]

    def crash(self, kept_bytes: int = 0, *, zeroed: bool = False) -> None:
        """Lose what was not synced, but for the first `kept_bytes` of what was appended.

        With `zeroed` the file kept its new length, and zeros took the place of the bytes.
        """
        for name, synced in self.synced.items():
            kept = self.live[name][len(synced) :][:kept_bytes]
            self.synced[name] = synced + (bytes(len(kept)) if zeroed else kept)
        self.live = dict(self.synced)
        self.fail_in = None

    def _count_down(self) -> None:
        if self.fail_in is None:
            return
        self.fail_in -= 1
        if self.fail_in < 0:
            raise OSError(errno.EIO, "the disk refused")
