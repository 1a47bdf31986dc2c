"""open_data: the queries of one data directory as plain methods, for notebooks and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.config import load
from indexd.errors import UsageError
from indexd.query.by_key import Answer
from indexd.query.by_queue import OffsetAnswer
from indexd.query.by_time import Boundary, LogTimeAnswer, QueueTimeAnswer
from indexd.query.coverage import Coverage
from indexd.query.message import TIME_MAX, TIME_MIN, NotFound
from indexd.query.questions import ByKey, ByMessage, ByQueueOffset, ByTime, Question, ask, make_question
from indexd.query.source import QueryIndex, open_index
from indexd.storage.disk import Disk


class Data:
    """What ``open_data`` opens, for a ``with`` block or ``close`` at the end; for one thread. Each call looks anew.

    Times in ms since the epoch, offsets as RocketMQ counts them. Answers are frozen dataclasses with ``to_dict()``.
    UsageError for arguments that are none, as by the command line.
    """

    def __init__(self, index: QueryIndex) -> None:
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
        more = {"begin": None if begin == TIME_MIN else begin, "end": end, "index_type": index_type, "before": before}
        answer: Answer = self._ask(ByKey, topic=topic, key=key, max=max_num, **more)
        return answer

    def by_queue(self, topic: str, queue_id: int, queue_offset: int = 0, *, max_num: int = 32) -> OffsetAnswer:
        """Messages of a queue from ``queue_offset`` on; the next page begins at the answer's ``next_offset``."""
        found: OffsetAnswer = self._ask(ByQueueOffset, topic=topic, queue=queue_id, offset=queue_offset, max=max_num)
        return found

    def at_time(self, topic: str, queue_id: int, timestamp: int, boundary: Boundary = "lower") -> QueueTimeAnswer:
        """The queue offset of a store time, as the broker's search finds it."""
        found: QueueTimeAnswer = self._ask(ByTime, topic=topic, queue=queue_id, time=timestamp, boundary=boundary)
        return found

    def log_at_time(self, timestamp: int) -> LogTimeAnswer:
        """The first message in the log with that store time or a later one."""
        found: LogTimeAnswer = self._ask(ByTime, time=timestamp)
        return found

    def message(self, where: int | str) -> Message | NotFound:
        """One message, whole and checked by its CRCs: by physical offset, or by its offset message id in hex."""
        self._opened().log.begin_query()
        given = {"id": where} if isinstance(where, str) else {"offset": where}
        found: Message | NotFound = self._ask(ByMessage, **given)
        return found

    def coverage(self) -> Coverage:
        """Which part of the log is indexed now."""
        return self._opened().look().coverage

    def set_check(self, check: Callable[[], None]) -> None:
        """``check`` is called again and again while a query runs, and ends it by raising an error of the caller's."""
        self.index.log.check = check

    def close(self) -> None:
        """Close every file; any call after that is a UsageError, but for another ``close``."""
        self._is_closed = True
        self.index.close()

    def __enter__(self) -> Data:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, model: type[Question], **given: Any) -> Any:
        return ask(self._opened(), make_question(model, given, typed=True))

    def _opened(self) -> QueryIndex:
        if self._is_closed:
            raise UsageError(f"{self!r} is closed", "open it again with open_data")
        return self.index


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
    return Data(open_index(Disk(), load(given, None, {})))
