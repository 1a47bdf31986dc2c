"""LogReaders over logs in a test's directory, with a clock that stands until it is moved, and bytes put in by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexd.commitlog.batcher import DispatchBatch, make_rules
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, ReaderOptions, Skipped
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.twins import DELAYS, FRAME_SIZE_MAX, DispatchRequest, request_at

SEGMENT_SIZE = 1 << 16
READ_SIZE = 1 << 16


@dataclass
class Clock:
    """Seconds that pass only when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def open_reader(
    directories: Path | Sequence[Path],
    clock: Callable[[], float] | None = None,
    *,
    segment_size: int = SEGMENT_SIZE,
    position: int = 0,
    frame_size_max: int = FRAME_SIZE_MAX,
    disk: Disk | None = None,
    **options: Any,
) -> LogReader:
    """A reader, closed when it is forgotten; a frame settles for 0.05 s, corrupt is what stays so for 5 s."""
    paths = (directories,) if isinstance(directories, Path) else tuple(directories)
    rules = make_rules(DELAYS, check_crc=True, frame_size_max=frame_size_max)
    settings = ReaderOptions(
        segment_size, **({"read_size": READ_SIZE, "rows_max": 100, "list_interval": 0.0} | options)
    )
    reader = LogReader(disk or Disk(), paths, rules, settings, position, clock or Clock())
    weakref.finalize(reader, reader._cursor.close)
    return reader


@dataclass
class Drained:
    """All that a reader returned until it had no more."""

    requests: list[DispatchRequest] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    end: NotYetWritten | Corrupt | None = None

    @property
    def offsets(self) -> list[int]:
        """Where the messages stand."""
        return [request.commit_log_offset for request in self.requests]

    def take(self, batch: DispatchBatch) -> None:
        """Add a batch, whose rows lie one behind the other and inside it."""
        rows = [request_at(batch, row) for row in range(batch.rows)]
        ends = [row.commit_log_offset + row.msg_size for row in rows]
        assert rows
        assert [row.commit_log_offset for row in rows] == [batch.begin_offset, *ends[:-1]]
        assert batch.end_offset == ends[-1]
        self.requests += rows


def drain(reader: LogReader, into: Drained | None = None) -> Drained:
    """Poll until the log ends or is corrupt; the clock is moved, by 2 s, for a newest frame that has to settle."""
    drained = into or Drained()
    waited = False
    while True:
        found = reader.poll()
        if isinstance(found, DispatchBatch):
            drained.take(found)
            waited = False
        elif isinstance(found, Skipped):
            drained.skipped.append(found)
        elif isinstance(found, NotYetWritten) and reader.settling_size and not waited:
            assert isinstance(reader._clock, Clock)
            reader._clock.now += 2.0
            waited = True
        else:
            drained.end = found
            return drained


def segment(directory: Path, base: int, data: bytes = b"", size: int = SEGMENT_SIZE) -> Path:
    """A full-size segment that begins with ``data`` and holds zeros behind it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{base:020d}"
    path.write_bytes(data.ljust(size, b"\0"))
    return path


def patch(path: Path, position: int, data: bytes) -> None:
    """Write into a segment in place, as its broker does."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def filled(directory: Path, count: int, *, body: int = 500, clean: bool = True, start: int = 0) -> list[int]:
    """Write a log of messages of one size, or go on with it at ``start``; their offsets."""
    writer = CommitLogWriter(directory, SEGMENT_SIZE, start_offset=start)
    offsets = [writer.append(FrameSpec("T", bytes([number % 255 + 1]) * body)) for number in range(count)]
    writer.close(clean)
    return offsets
