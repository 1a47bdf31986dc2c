"""What runs beside the stages, in threads of its own: looks at the disk, the broker and the log's end; scrubs.

DiskWatermark has indexing stop before the broker's disk is so full that the broker minds. A broker cleans up early at
75 % (diskMaxUsedSpaceRatio), deletes what is not expired yet at 85 % (diskSpaceCleanForciblyRatio) and refuses messages
at 90 % (diskSpaceWarningLevelRatio). Below its first line the index gives way: it is derived, and can be built later.

A look of Around may hang, on a file system over a network as on a broker that does not answer; then only these figures
are old.

Scrubbing reads everything that was built, once an interval, in a thread of the lowest priority. What is damaged ends it
with DamagedError, and the opening that follows mends it; then it begins again, later each time that it finds something.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.format import EndOfFile
from indexd.commitlog.lookup import LogView
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import log_end
from indexd.config import Config
from indexd.errors import DiskError, IndexdError
from indexd.flush.pipeline import Pipeline
from indexd.index.format import FileMark
from indexd.recovery.recover import DamagedError
from indexd.service.broker import BrokerLimit, BrokerWatch
from indexd.service.instance import Instance
from indexd.service.state import LagMeter
from indexd.storage.disk import Disk
from indexd.verify.scrub import Scrub

# How far it has to fall below the mark before indexing goes on: an index file that is allocated must not undo it.
_HYSTERESIS = 0.01


class DiskWatermark:
    """Whether the data directory's file system is too full to index; remembers that it was."""

    def __init__(self, data: Path, used_max: float) -> None:
        self._data, self._used_max = data, used_max
        #: Indexing has to wait, as of the last check.
        self.is_over = False

    def check(self) -> None:
        """Raise DiskError, a transient one, while it is fuller than ``used_max``, and then until it is 1 % less full.

        A ``used_max`` of 1 means never.
        """
        ratio = used_ratio(self._data)
        self.is_over = self._used_max < 1 and ratio > self._used_max - (_HYSTERESIS if self.is_over else 0.0)
        if self.is_over:
            text = f"its file system is {ratio:.1%} full and disk_used_max is {self._used_max:.1%}"
            raise DiskError("index into", self._data, OSError(errno.ENOSPC, text))


def used_ratio(path: Path) -> float:
    """How full the file system of ``path`` is, as the broker and ``df`` count it: of what is not kept for root alone.

    Raises DiskError.
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise DiskError("stat", path, error) from error
    used = status.f_blocks - status.f_bfree
    return used / (used + status.f_bavail) if used + status.f_bavail else 0.0


_EVERY_SECONDS = 1.0
# So long a start waits for the first look.
_FIRST_SECONDS = 3.0
# Of a look at the broker, what is worth an event when it changes.
_TOLD = ("alive", "indexing", "answers")


class Around:
    """A context manager around the process's whole life; what it finds is on the board."""

    def __init__(
        self,
        instance: Instance,
        *,
        make_watch: Callable[[Config, Disk], BrokerWatch] = BrokerWatch,
        every_seconds: float = _EVERY_SECONDS,
        first_seconds: float = _FIRST_SECONDS,
    ) -> None:
        self._instance, self._node, self._make_watch = instance, instance.config.node, make_watch
        self._every, self._first = every_seconds, first_seconds
        self._watch = make_watch(instance.config, instance.disk)
        # Who reads the log now.
        self._followed: tuple[LogReader, LagMeter] | None = None
        self._broker_due = 0.0
        # What was said last of the broker, of what is unsafe, and of a look that failed.
        self._told: object = None
        self._unsafe: list[str] = []
        self._failure = ""
        self._leave, self._has_looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="around", daemon=True)

    def __enter__(self) -> Around:
        self._thread.start()
        self._has_looked.wait(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(self._first)

    @property
    def log_limit(self) -> BrokerLimit:
        """Who is asked how far the log goes."""
        return self._watch.log_limit

    def follow(self, reader: LogReader, meter: LagMeter) -> None:
        """Before its first poll: ``reader`` believes no more than the broker vouches for, as far as it is asked.

        From now on ``meter`` is told how far the log goes while the reader is behind.
        """
        reader.log_limit = self._watch.log_limit
        with suppress(IndexdError):  # so that the first figures are those of the whole log
            meter.seen_end = log_end(self._instance.disk, reader.log, reader.position)
        self._followed = (reader, meter)

    def unfollow(self) -> None:
        """The reader is closed, or will be."""
        self._followed = None

    def look(self) -> None:
        """Once, at what is due."""
        with suppress(IndexdError):  # whoever writes there meets and reports it
            self._instance.board.disk_used_ratio = round(used_ratio(self._instance.config.store.data), 4)
        if self._followed is not None:
            self._look_at_log(*self._followed)
        if time.monotonic() >= self._broker_due:
            self._look_at_broker()
            self._broker_due = time.monotonic() + self._instance.config.node.broker_check_interval

    def _run(self) -> None:
        while True:
            try:
                self.look()
                self._failure = ""
            except Exception as error:  # noqa: BLE001 - the index goes on, whatever cannot be looked at
                if repr(error) != self._failure:
                    self._failure = repr(error)
                    self._instance.log.error("look_failed", problem=self._failure)  # noqa: TRY400 - a line, no trace
            self._has_looked.set()
            if self._leave.wait(self._every):
                self._watch.close()
                return

    def _look_at_broker(self) -> None:
        if self._instance.config.node is not self._node:  # a HUP
            self._watch.close()
            self._node = self._instance.config.node
            self._watch = self._make_watch(self._instance.config, self._instance.disk)
            if self._followed is not None:
                reader, meter = self._followed
                reader.log_limit, meter.held_at = self._watch.log_limit, None
        found = self._watch.look()
        self._instance.board.broker = found
        told = tuple(found.get(key) for key in _TOLD)
        if told != self._told:
            self._told = told
            said = ("alive", "pid", "how", "why", "indexing", "indexingWhy", "address", "answers", "silence")
            self._instance.log.info("broker", **{key: found.get(key) for key in said})
        unsafe = found["unsafe"]
        if unsafe and unsafe != self._unsafe:
            self._instance.log.warning("broker_unsafe", texts=unsafe)
        self._unsafe = unsafe

    def _look_at_log(self, reader: LogReader, meter: LagMeter) -> None:
        limit = self._watch.log_limit
        if meter.is_at_end and not limit.bounds:
            return
        with suppress(IndexdError):  # the reader meets it as well, and says so
            position, is_waiting = reader.position, meter.is_waiting and not reader.is_undecided
            seen = log_end(self._instance.disk, reader.log, position)
            if limit.bounds:
                has_messages = is_waiting and seen > position and self._has_messages(position, seen)
                meter.held_at = position if limit.holds_back(position, has_messages=has_messages) else None
            if not meter.is_at_end or meter.held_at == reader.position:
                meter.seen_end = seen

    def _has_messages(self, position: int, seen: int) -> bool:
        # What is left of a message that was never whole is none.
        store = self._instance.config.store
        options = DecoderOptions(check_crc=True)
        with closing(LogView(self._instance.disk, store.commit_log_directories, store.segment_size, options)) as lookup:
            found, segment = lookup.at(position), lookup.log.at(position)
        is_past_end = isinstance(found, EndOfFile) and segment is not None and seen > segment.end
        return is_past_end or isinstance(found, Message)


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
    def seconds_left(self) -> float:
        """Until the next one is due; without an end when there is to be none."""
        interval, row = self._instance.config.recovery.scrub_interval, self._instance.board.scrub
        if not interval:
            return math.inf
        now, last = time.time(), self._pipeline.scrubbed_at
        due = 0.0 if last is None or last > now * 1000 else last / 1000 + interval
        tries = row["brokenOff"]
        if tries:
            due = max(due, row["endedAt"] / 1000 + min(_AGAIN_SECONDS_MIN * 2 ** min(tries - 1, 20), interval))
        return max(due - now, 0.0)

    def run(self) -> None:
        """One scrub, if nothing ends it. Raises DamagedError, DiskError."""
        began, board, pipeline = time.time(), self._instance.board, self._pipeline
        scrub = Scrub(
            self._instance.disk,
            self._instance.files,
            pipeline.outputs,
            lambda: pipeline.frontier,
            self._on_bytes,
            self.adopted.append,
        )
        self._ahead = time.monotonic()
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
