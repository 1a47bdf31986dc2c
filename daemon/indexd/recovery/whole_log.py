"""WholeLog: the log from where a reader stands to where it ends now, for commands that do not wait for more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, ReaderOptions, Skipped
from indexd.errors import CorruptDataError

_PAUSE = 0.002
# Bytes at the end that are no frame are given so long to become one; the daemon, which has time, gives them more.
_CORRUPT_AFTER = 0.25


def once(options: ReaderOptions) -> ReaderOptions:
    """Options for reading a log once."""
    return replace(options, corrupt_after=min(options.corrupt_after, _CORRUPT_AFTER))


class WholeLog:
    """Iterates over a log; ``unreadable`` is set when its last bytes are no frame, as after a crash of the broker.

    Raises CorruptDataError for unreadable bytes behind which the log goes on, unless the reader may skip them.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self.unreadable: Corrupt | None = None

    def __iter__(self) -> Iterator[DispatchBatch | Skipped]:
        while True:
            found = self._reader.poll()
            if isinstance(found, Corrupt):
                self._judge(found)
                return
            if not isinstance(found, NotYetWritten):
                yield found
            elif self._reader.is_undecided:
                time.sleep(_PAUSE)
            else:
                return

    def _judge(self, corrupt: Corrupt) -> None:
        if corrupt.path is None or self._reader.frames_follow():
            where = f" of {corrupt.path}" if corrupt.path else ""
            raise CorruptDataError(
                f"the log is corrupt at offset {corrupt.offset}{where}: {corrupt.reason}",
                "give --on-corrupt skip to go on at the next frame that proves itself",
            )
        self.unreadable = corrupt
