"""What a LogReader is told, counts and returns besides batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skipped:
    """``[begin, end)`` of the log was passed over: it expired, it is missing, or it is corrupt and policy says skip."""

    begin: int
    end: int
    reason: str
    #: It expired, and everything before it.
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How the reader reads; times in seconds, sizes in bytes."""

    segment_size: int
    read_size: int = 4 << 20
    rows_max: int = 65536
    settle: float = 0.05
    corrupt_after: float = 5.0
    skip_corrupt: bool = False
    verify_crc: bool = False
    #: CRC of every frame of the segment being written; a rebuild leaves it to the newest frame.
    check_tail: bool = True
    #: Threads that read and decode ahead while catching up: for a rebuild, which has the machine to itself.
    workers: int = 0
    list_interval: float = 10.0
    #: Of segments that end so much before the log's last one, the page cache that reading takes is given back.
    drop_behind: int | None = None


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met; plain numbers that only grow."""

    messages: int = 0
    bytes: int = 0
    segments_opened: int = 0
    segments_twice: int = 0
    expired_bytes: int = 0
    corrupt_bytes: int = 0
    corrupt_found: int = 0
    settled: int = 0
    #: Page cache given back.
    dropped_bytes: int = 0

    def pass_over(self, skipped: Skipped) -> None:
        """Count the bytes of it, as expired or as corrupt."""
        if skipped.is_expired:
            self.expired_bytes += skipped.end - skipped.begin
        else:
            self.corrupt_bytes += skipped.end - skipped.begin
