"""BrokerWatch: is the broker alive, does it index itself, how far does its log go, and what would be unsafe.

It only says so. What is unsafe keeps the next start from going on (exit 3), never a running daemon: our files are our
own, so a broker that indexes as well does double work and no harm, while a stop would leave the hole that mode offload
is there to avoid.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.service.broker_find import BrokerFinder
from indexd.service.broker_indexing import IndexingWatch
from indexd.service.broker_limit import NOT_ASKED, BrokerLimit
from indexd.storage.broker_lock import BrokerLock, look_at_lock
from indexd.storage.disk import Disk

# While nobody holds the lock, a broker that loads its store is looked for so often.
_PROCESSES_SECONDS = 60.0
# Between the last word of a broker that ends and the end of its lock.
_ENDING_SECONDS = 0.2


class BrokerWatch:
    """Looks when it is told to, from one thread."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._store = config.store.store
        # What a look into all processes found when nobody held the lock, and when the next one is due.
        self._nobody = BrokerLock(False, None, "none")
        self._processes_due = 0.0
        self._indexing = IndexingWatch(config, disk)
        address, interval = config.node.broker_address, config.node.broker_check_interval
        finder = BrokerFinder(config, self._look_at_lock, partial(list_log, config, disk))
        #: For the reader.
        self.log_limit = BrokerLimit(finder if address is None else address, retry_max=interval)

    def look(self) -> dict[str, Any]:
        """What ``board.broker`` holds; never raises, takes some two seconds at most.

        ``alive`` with ``pid``, ``how`` and ``why`` as BrokerLock has them; ``indexing`` and ``indexingWhy`` as Indexing
        has them; ``address``, ``answers``, ``silence`` and ``maxOffset``: as it was asked last, None before that;
        ``unsafe``: texts, each naming the remedy.
        """
        lock = self._look_at_lock()
        indexing = self._indexing.look(lock)
        limit, unsafe = self.log_limit, list(indexing.unsafe)
        if limit.bounds:
            limit.refresh()
            if limit.silence is not None and lock.how == "lock":
                # One that is killed or stopped closes its connections a moment before its lock, or behind it.
                time.sleep(_ENDING_SECONDS)
                lock = self._look_at_lock()
            # A broker that is down or loads its store is expected to be silent.
            unsafe += limit.unsafe(is_expected=lock.how == "lock")
        return {
            "alive": lock.alive,
            "pid": lock.pid,
            "how": lock.how,
            "why": lock.why,
            "indexing": indexing.on,
            "indexingWhy": indexing.why,
            "address": limit.address,
            "answers": None if limit.silence == NOT_ASKED else limit.silence is None,
            "silence": None if limit.silence == NOT_ASKED else limit.silence,
            "maxOffset": limit.offset,
            "checkedAt": int(time.time() * 1000),
            "unsafe": unsafe,
        }

    def close(self) -> None:
        """Close the connection to the broker."""
        self.log_limit.close()

    def _look_at_lock(self) -> BrokerLock:
        if self._store is None:
            return BrokerLock(None, None, "unknown", "no store is given, only commitlog directories")
        path = self._store / "lock"
        if time.monotonic() < self._processes_due:
            lock = look_at_lock(path, proc=None)
            return self._nobody if lock.how == "none" else lock
        lock = look_at_lock(path)
        if lock.how in ("none", "unknown"):
            self._nobody, self._processes_due = lock, time.monotonic() + _PROCESSES_SECONDS
        return lock


def list_log(config: Config, disk: Disk) -> SegmentList:
    """The segments as they are now; raises IndexdError."""
    return list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
