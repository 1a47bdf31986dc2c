"""Append: where an export goes on, and whether the log is still the one that earlier exports of the target have read.

An export keeps its last message in the manifest: where it begins, its size, and the CRC-32 of its frame (of the first
64 KiB). A log in which another frame stands there, or none, was cut or written anew: the target holds rows that are no
longer in it, and lacks others. What this cannot show is a log that was cut before that message while its bytes still
stand; it shows when the broker has written over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.errors import DisturbedError, UnsafeStoreError, UsageError
from indexd.spark.export.target import Export, LastMessage
from indexd.storage.disk import Disk

OnExpired = Literal["fail", "skip"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where an export begins: at physical offset ``begin``, None: where the log does.

    ``expired`` are log bytes ``[first, end)`` that no export has read and that are gone; ``last`` is the last message
    before.
    """

    begin: int | None = None
    expired: tuple[int, int] | None = None
    last: LastMessage | None = None

    @property
    def expired_bytes(self) -> int:
        """Bytes of log."""
        return self.expired[1] - self.expired[0] if self.expired else 0


def continued(
    disk: Disk, config: Config, to: Path, earlier: Sequence[Export], selection: dict[str, Any], on_expired: OnExpired
) -> Continuation:
    """Go on behind ``earlier``, the exports of this store that ``to`` holds.

    UsageError when they selected other messages. UnsafeStoreError for a log that is not the one that they have read,
    and unless it may be skipped, for one of which something expired since.
    """
    if not earlier:
        return Continuation()
    mine = [export for export in earlier if export.selection == selection]
    if not mine:
        raise UsageError(
            f"{to} holds an export of this store with other topics or times: messages of both would be there twice",
            "append with the same --topics, -b and -e, or export into another directory",
        )
    before = max(mine, key=lambda export: export.end_offset)
    end = before.end_offset
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    first = log.min_offset or 0
    if first > end:
        if on_expired == "fail":
            raise UnsafeStoreError(
                f"the log begins at {first}, and {to} holds what it had up to {end}: {first - end} bytes between them"
                " have expired before they were exported",
                "give --on-expired skip to go on without them, or export anew with --mode overwrite",
            )
        return Continuation(first, (end, first), None)
    _check_same(disk, log, to, before)
    return Continuation(end, None, before.last_message)


def last_message(disk: Disk, config: Config, message: tuple[int, int] | None) -> LastMessage | None:
    """The evidence of a message that was just read, its physical offset and its size; None if it has expired by now.

    DisturbedError when another frame stands there already.
    """
    if message is None:
        return None
    offset, size = message
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with FrameReader(disk, log) as frames:
        found = frames.evidence(offset)
    if offset < (log.min_offset or 0):
        return None
    if found is None or found.size != size:
        raise DisturbedError(f"the log was cut at {offset} or before while it was read", "export again")
    return LastMessage(offset, size, found.crc)


def _check_same(disk: Disk, log: SegmentList, to: Path, before: Export) -> None:
    end, last = before.end_offset, before.last_message
    log_end = log.segments[-1].end if log.segments else 0
    if log_end < end:
        raise _changed(f"the log ends at {log_end}, and {to} holds what it had up to {end}")
    if last is None or last.offset < (log.min_offset or 0):
        return
    behind = last.offset + last.size
    with FrameReader(disk, log) as frames:
        found = frames.evidence(last.offset)
        if found is None or (found.size, found.crc) != (last.size, last.crc):
            what = "no message any more" if found is None else "another message"
            raise _changed(f"the last message that {to} holds began at {last.offset} of the log, where {what} stands")
        if behind < end and frames.evidence(behind) is not None:
            raise _changed(f"at {behind} of the log stands a message that {to}, which holds it up to {end}, has not")


def _changed(what: str) -> UnsafeStoreError:
    return UnsafeStoreError(
        what, "it was cut or is another: export anew with --mode overwrite, or into another directory"
    )
