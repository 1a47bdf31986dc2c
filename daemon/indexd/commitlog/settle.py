"""The end of the log, where the writer is: bytes that count only when a second look finds them unchanged."""

from __future__ import annotations

from collections.abc import Callable

from indexd.commitlog.format import FLAG_BORN_HOST_V6, FLAG_STORE_HOST_V6, MAGIC_V1


class Settling:
    """The bytes at one offset, and since when they have been as they are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget: the reader has moved on."""
        self.offset = -1
        self.is_frame = False
        self._data = b""
        self._since = 0.0

    def size_at(self, offset: int) -> int:
        """How many bytes of whole frames settle at ``offset``; 0 for none."""
        return len(self._data) if self.is_frame and self.offset == offset else 0

    def unchanged_for(self, offset: int, data: bytes, seconds: float, *, is_frame: bool) -> bool:
        """Whether ``data`` has stood at ``offset`` for so long; remembers it otherwise."""
        now = self._clock()
        if self.offset != offset or self._data != data:
            self.offset, self._data, self._since = offset, data, now
        self.is_frame = is_frame
        return self._data == data and self._since < now and now - self._since >= seconds


def has_nul(data: bytes) -> bool:
    """Whether the topic or properties of a whole frame hold a NUL.

    No CRC need cover them; a sane producer sends none, and preallocated bytes are nothing else.
    """
    flags = int.from_bytes(data[36:40], "big")
    body = 72 + (20 if flags & FLAG_BORN_HOST_V6 else 8) + (20 if flags & FLAG_STORE_HOST_V6 else 8)
    topic_size = body + max(int.from_bytes(data[body - 4 : body], "big", signed=True), 0)
    topic = topic_size + (1 if int.from_bytes(data[4:8], "big") == MAGIC_V1 else 2)
    topic_end = topic + int.from_bytes(data[topic_size:topic], "big")
    return b"\0" in data[topic:topic_end] or b"\0" in data[topic_end + 2 :]
