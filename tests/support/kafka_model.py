"""How a Kafka segment feeds its indexes, a batch at a time: a plain twin of the kernel (spec kafka-index 8)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entries:
    """The per-batch rule; offsets as they are given, relative or not."""

    interval: int
    offsets: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)
    bytes_since: int = 0
    largest: tuple[int, int] | None = None

    def put(self, position: int, size: int, last_offset: int, timestamp: int) -> None:
        """One batch."""
        if timestamp > (-1 if self.largest is None else self.largest[0]):
            self.largest = (timestamp, last_offset)
        if self.bytes_since > self.interval:
            self.offsets.append((last_offset, position))
            self._put_time()
            self.bytes_since = 0
        self.bytes_since += size

    def roll(self) -> None:
        """No more batches."""
        self._put_time()

    def _put_time(self) -> None:
        if self.largest is not None and (not self.times or self.largest[0] > self.times[-1][0]):
            self.times.append(self.largest)
