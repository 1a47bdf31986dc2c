"""Scrubbing: when a scrub is due, how fast it reads, and what it came to.

A thread of the lowest priority reads everything that was built, once an interval. What is damaged ends it with
DamagedError, and the opening that follows mends it; then it begins again, later each time that it finds something.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from indexd.errors import DiskError
from indexd.flush.pipeline import Pipeline
from indexd.index.format import FileMark
from indexd.recovery.recover import DamagedError
from indexd.service.instance import Instance
from indexd.verify.scrub import Scrub

# Bytes a second: an index file of 420 MB in 13 s, 2.7 TB in a day.
_RATE_MAX = 32 << 20
# Behind one that was broken off by damage or by the disk.
_AGAIN_SECONDS_MIN = 60.0


class _StoppedError(Exception):
    """The daemon stops, or is opened again."""


class Scrubbing:
    """``run`` is for a thread of its own; ``adopted`` is emptied by the building thread."""

    def __init__(self, instance: Instance, pipeline: Pipeline, stop: threading.Event) -> None:
        self._instance, self._pipeline, self._stop = instance, pipeline, stop
        #: Full index files whose checksums became known.
        self.adopted: deque[FileMark] = deque()
        self._ahead = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the next one is due; None when there is to be none."""
        interval, row = self._instance.config.recovery.scrub_interval, self._instance.board.scrub
        if not interval:
            return None
        now, last = time.time(), self._pipeline.scrubbed_at
        due = 0.0 if last is None or last > now * 1000 else last / 1000 + interval
        tries = row["brokenOff"]
        if tries:
            due = max(due, row["endedAt"] / 1000 + min(_AGAIN_SECONDS_MIN * 2 ** min(tries - 1, 20), interval))
        return max(due - now, 0.0)

    def run(self) -> None:
        """One scrub, if nothing ends it. Raises DamagedError, DiskError."""
        began, board = time.time(), self._instance.board
        files, self._ahead = self._instance.files, time.monotonic()
        pipeline = self._pipeline
        scrub = Scrub(
            self._instance.disk, files, pipeline.outputs, lambda: pipeline.frontier, self._on_bytes, self.adopted.append
        )
        board.scrub = {**board.scrub, "beganAt": int(began * 1000)}
        before = board.scrub["bytes"]
        try:
            checked = scrub.run()
        except _StoppedError:
            return
        except (DamagedError, DiskError) as error:
            if self._stop.is_set():
                return
            is_damage = isinstance(error, DamagedError)
            self._ended(damaged=board.scrub["damaged"] + is_damage, brokenOff=board.scrub["brokenOff"] + 1)
            raise
        self._pipeline.scrubbed_at = int(began * 1000)
        self._ended(brokenOff=0)
        size, seconds = board.scrub["bytes"] - before, round(time.time() - began, 3)
        self._instance.log.info("scrubbed", files=checked, bytes=size, seconds=seconds, checksums=scrub.adopted)

    def _ended(self, **figures: int) -> None:
        board = self._instance.board
        board.scrub = {**board.scrub, "endedAt": int(time.time() * 1000), **figures}

    def _on_bytes(self, size: int) -> None:
        board = self._instance.board
        board.scrub = {**board.scrub, "bytes": board.scrub["bytes"] + size}
        self._ahead = max(self._ahead, time.monotonic() - 1) + size / _RATE_MAX
        if self._stop.wait(max(self._ahead - time.monotonic(), 0.0)):
            raise _StoppedError
