"""The messages of one stretch of the log, and where the log ends if that is inside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from indexd.audit.plan import NEVER
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.config import Config
from indexd.index.format import FLAVOURS
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import once
from indexd.storage.disk import Disk

_PAUSE = 0.002
# A broker may write for ever: what comes later than this after the reader has caught up is not read.
_TAIL_SECONDS = 1.0


class Rows(NamedTuple):
    """Messages ``first`` .. ``last - 1`` of a batch."""

    batch: DispatchBatch
    first: int
    last: int


@dataclass(slots=True)
class Stretch:
    """Messages that start in ``[begin, end)``, read from ``aligned`` on: the start of a message or of a segment.

    While iterated, ``position`` is how far all is known; in the end ``log_end`` is set if the log ends inside, and
    ``unreadable`` if it ends in bytes that are no frame. ``log_begin``: where the log began when it was read.
    """

    begin: int
    end: int
    aligned: int
    flavour: str
    want_queue: bool = False
    position: int = 0
    log_end: int | None = None
    unreadable: Corrupt | None = None
    log_begin: int | None = None
    #: Where it may end though a broker writes on, faster than it can be read: no file that is known points behind it.
    enough: int = NEVER

    def read(self, disk: Disk, config: Config, workers: int) -> Iterator[Rows | Skipped]:
        """Rows in the order of the log; Skipped for what could not be read, cut to the stretch."""
        reader = _reader(disk, config, self.flavour, workers, want_queue=self.want_queue)
        reader.position, self.position = self.aligned, self.begin
        caught_up_at = None
        try:
            while reader.position < self.end:
                poll = reader.poll()
                self.log_begin = reader.log.min_offset
                if isinstance(poll, DispatchBatch):
                    yield from self._clip(poll)
                    self.position = max(self.begin, min(reader.position, self.end))
                elif isinstance(poll, Skipped):
                    begin, end = max(poll.begin, self.begin), min(poll.end, self.end)
                    if begin < end:
                        yield replace(poll, begin=begin, end=end)
                        self.position = end
                elif isinstance(poll, NotYetWritten) and reader.is_undecided:
                    caught_up_at = time.monotonic() if caught_up_at is None else caught_up_at
                    time.sleep(_PAUSE)
                else:
                    self.unreadable = poll if isinstance(poll, Corrupt) else None
                    break
                if caught_up_at is not None and time.monotonic() - caught_up_at > _TAIL_SECONDS:
                    break
                if self.enough <= reader.position < self.end:
                    break
            if reader.position < self.end:
                self.log_end = max(reader.position, self.begin)
        finally:
            reader.close()

    def _clip(self, batch: DispatchBatch) -> Iterator[Rows]:
        offsets = batch.columns.phy_offset[: batch.rows]
        first, last = (int(offsets.searchsorted(bound)) for bound in (self.begin, self.end))
        if first < last:
            yield Rows(batch, first, last)


def _reader(disk: Disk, config: Config, flavour: str, workers: int, *, want_queue: bool) -> LogReader:
    kind = FLAVOURS[flavour]
    rules = decode_rules(config)._replace(want_uniq_key=kind.uniq_key, want_tags=kind.tags, want_queue=want_queue)
    options = replace(once(reader_options(config)), skip_corrupt=True, check_tail=False, workers=workers)
    reader = LogReader(disk, config.store.commit_log_directories, rules, options)
    reader.refresh()
    return reader
