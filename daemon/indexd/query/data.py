"""open_data: all queries of one data directory as plain methods, for notebooks and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from indexd.commitlog.decoder import Message
from indexd.config import Config, load
from indexd.errors import UsageError
from indexd.query.answer import TIME_MAX, TIME_MIN, Answer, KeyQuery
from indexd.query.by_key import one_of, query_exact, text, whole
from indexd.query.by_queue import OffsetAnswer, OffsetQuery, query_offset
from indexd.query.by_time import BOUNDARIES, Boundary, LogTimeAnswer, QueueTimeAnswer, query_log_time, query_time
from indexd.query.coverage import Coverage
from indexd.query.log import LogView
from indexd.query.message import NotFound, find_by_id, find_by_offset, parse_message_id
from indexd.query.source import QueryIndex, Split, known_frontier, open_index, open_log, split_log
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles


class Data:
    """What ``open_data`` opens, for a ``with`` block or ``close`` at the end; for one thread. Each call looks anew.

    Times in ms since the epoch, offsets as RocketMQ counts them. Answers are frozen dataclasses with ``to_dict()``.
    UsageError for arguments that are none, as by the command line.
    """

    def __init__(self, disk: Disk, config: Config, index: QueryIndex) -> None:
        self._disk = disk
        self._config = config
        self._checked_log: LogView | None = None
        self._is_closed = False
        #: For what has no method here, such as ``query_rocketmq``.
        self.index = index

    def __repr__(self) -> str:
        return f"Data({self.index})"

    def by_key(
        self,
        topic: str,
        key: str,
        *,
        max_num: int = 64,
        begin: int = TIME_MIN,
        end: int = TIME_MAX,
        index_type: str | None = None,
        before: int | None = None,
    ) -> Answer:
        """Messages with that key, unique key or (``index_type="T"``) tags, newest first, stored in ``[begin, end]``.

        Cut off by ``max_num``, the answer has a ``cursor``, which is the ``before`` of the next page.
        """
        self._check_open()
        one_of("index_type", index_type, ("K", "U", "T", None))
        if begin != TIME_MIN:  # which is none
            begin = whole("begin", begin, at_least=0)
        query = KeyQuery(
            text("topic", topic),
            text("key", key),
            whole("max_num", max_num, at_least=1),
            begin,
            whole("end", end, at_least=0),
            index_type,
            None if before is None else whole("before", before, at_least=0),
        )
        return query_exact(self.index, query)

    def by_queue(self, topic: str, queue_id: int, queue_offset: int = 0, *, max_num: int = 32) -> OffsetAnswer:
        """Messages of a queue from ``queue_offset`` on; the next page begins at the answer's ``next_offset``."""
        self._check_open()
        query = OffsetQuery(
            text("topic", topic),
            whole("queue_id", queue_id, at_least=0),
            whole("queue_offset", queue_offset, at_least=0),
            whole("max_num", max_num, at_least=1),
        )
        return query_offset(self.index, query)

    def at_time(self, topic: str, queue_id: int, timestamp: int, boundary: Boundary = "lower") -> QueueTimeAnswer:
        """The queue offset of a store time, as the broker's search finds it."""
        self._check_open()
        one_of("boundary", boundary, BOUNDARIES)
        found = whole("queue_id", queue_id, at_least=0), whole("timestamp", timestamp, at_least=0)
        return query_time(self.index, text("topic", topic), *found, boundary)

    def log_at_time(self, timestamp: int) -> LogTimeAnswer:
        """The first message in the log with that store time or a later one."""
        self._check_open()
        return query_log_time(self.index, whole("timestamp", timestamp, at_least=0))

    def split_log(self, size: int) -> tuple[Split, ...]:
        """The indexed log in stretches of about ``size`` bytes, each from a message on, and their messages."""
        self._check_open()
        return split_log(self.index, whole("size", size))

    def message(self, where: int | str) -> Message | NotFound:
        """One message, whole and checked by its CRCs: by physical offset, or by its offset message id in hex."""
        self._check_open()
        if self._checked_log is None:
            frontier = known_frontier(self._disk, DataFiles(self._config.store.data))
            self._checked_log = open_log(self._disk, self._config, frontier, check_crc=True)
            self._checked_log.check = self.index.log.check
        self._checked_log.begin_query()
        if isinstance(where, str):
            return find_by_id(self._checked_log, parse_message_id(where))
        return find_by_offset(self._checked_log, whole("where", where, at_least=0))

    def coverage(self) -> Coverage:
        """Which part of the log is indexed now."""
        self._check_open()
        return self.index.look().coverage

    def set_check(self, check: Callable[[], None]) -> None:
        """``check`` is called again and again while a query runs, and ends it by raising an error of the caller's."""
        self.index.log.check = check
        if self._checked_log is not None:
            self._checked_log.check = check

    def close(self) -> None:
        """Close every file; any call after that is a UsageError, but for another ``close``."""
        self._is_closed = True
        self.index.close()
        if self._checked_log is not None:
            self._checked_log.close()

    def __enter__(self) -> Data:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self!r} is closed", "open it again with open_data")


def open_data(
    data: str | PathLike[str],
    *,
    store: str | PathLike[str] | None = None,
    commit_log_paths: Sequence[str | PathLike[str]] = (),
) -> Data:
    """Open the data directory of an indexd, running or not.

    Where the log lies is known there; ``store`` (storePathRootDir) or ``commit_log_paths`` say it for a copy elsewhere.
    UsageError if there is no index, and IndexdError of other kinds, each with a ``hint``. Neither the environment nor a
    configuration file is read.
    """
    given = {"data": str(Path(data))}
    if store is not None:
        given["store"] = str(Path(store))
    if commit_log_paths:
        given["commit_log_paths"] = ",".join(str(Path(path)) for path in commit_log_paths)
    config, disk = load(given, None, {}), Disk()
    return Data(disk, config, open_index(disk, config))
