"""LogRange: a range of the log read once, for audit, verify and repair; what cannot be read is passed over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from indexd.commitlog.batcher import DispatchBatch, within
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.config import Config
from indexd.index.format import FLAVOURS
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import once
from indexd.storage.disk import Disk

#: Behind every offset.
NEVER = (1 << 63) - 1
_PAUSE = 0.002
# So long the reader waits in all for what stands at the end of the log to be decided.
_TAIL_SECONDS = 1.0


@dataclass(slots=True)
class LogRange:
    """Messages that start in ``[begin, end)``, read from ``aligned`` on: the start of a message or of a segment.

    While iterated, ``position`` is how far all is known; in the end ``log_end`` is set if the log ends inside, and
    ``unreadable`` if it ends in bytes that are no frame. ``log_begin``: where the log began when it was read. It goes
    on to ``stop`` at most: a log may grow for ever.
    """

    begin: int
    end: int
    aligned: int
    flavour: str
    want_queue: bool = False
    stop: int = NEVER
    position: int = 0
    log_end: int | None = None
    unreadable: Corrupt | None = None
    log_begin: int | None = None

    def read(self, disk: Disk, config: Config, workers: int) -> Iterator[DispatchBatch | Skipped]:
        """Batches in the order of the log, Skipped for what could not be read, both cut to the range."""
        kind = FLAVOURS[self.flavour]
        rules = decode_rules(config)._replace(
            want_uniq_key=kind.uniq_key, want_tags=kind.tags, want_queue=self.want_queue
        )
        options = replace(once(reader_options(config)), skip_corrupt=True, check_tail=False, workers=workers)
        reader = LogReader(disk, config.store.commit_log_directories, rules, options)
        reader.refresh()
        reader.position, self.position = self.aligned, self.begin
        left = _TAIL_SECONDS
        try:
            while reader.position < self.end:
                poll = reader.poll()
                self.log_begin = reader.log.min_offset
                if isinstance(poll, DispatchBatch):
                    self.position = max(self.begin, min(reader.position, self.end))
                    batch = within(poll, self.begin, self.end)
                    if batch.rows:
                        yield batch
                elif isinstance(poll, Skipped):
                    begin, end = max(poll.begin, self.begin), min(poll.end, self.end)
                    if begin < end:
                        self.position = end
                        yield replace(poll, begin=begin, end=end)
                elif isinstance(poll, NotYetWritten) and reader.is_undecided and left > 0:
                    left -= _PAUSE
                    time.sleep(_PAUSE)
                else:
                    self.unreadable = poll if isinstance(poll, Corrupt) else None
                    break
                if reader.position >= self.stop:
                    break
            if reader.position < self.end:
                self.log_end = max(reader.position, self.begin)
        finally:
            reader.close()
