"""The questions that every surface asks, as models with names, bounds, defaults and help; and open_data, to ask them.

The command line makes its commands and options from ``QUESTIONS``, HTTP its parameters, the docs their table; a new
question is one more model in that list.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as to_int
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from indexd.commitlog.decoder import Message
from indexd.commitlog.lookup import LogView
from indexd.config import load
from indexd.config.units import wrong_fields
from indexd.errors import UsageError
from indexd.query.by_key import Answer, KeyQuery, query_exact, query_rocketmq
from indexd.query.by_queue_and_time import (
    Boundary,
    LogTimeAnswer,
    OffsetAnswer,
    OffsetQuery,
    QueueTimeAnswer,
    query_log_time,
    query_offset,
    query_time,
)
from indexd.query.message import TIME_MAX, TIME_MIN, NotFound, find_by_id, find_by_offset, parse_message_id
from indexd.query.source import Coverage, QueryIndex, open_index
from indexd.storage.disk import Disk

Q = TypeVar("Q", bound="Question")
# Longer than any that is allowed, so that what is too large is said to be.
_DIGITS = re.compile(r"-?[0-9]{1,40}", re.ASCII)
#: The context of a validation in which numbers have to be numbers, and no texts.
TYPED = "typed"


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of the command line that give a field, and what help calls its value."""

    names: tuple[str, ...]
    metavar: str | None = None


def _whole(value: object, info: ValidationInfo) -> int:
    # What numpy and the like have for an int is one; True and 1.0 are none.
    if isinstance(value, str) and info.context != TYPED and _DIGITS.fullmatch(value):
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return to_int(value)  # type: ignore[arg-type]  # that is what is being asked
    except TypeError:
        raise ValueError("is no whole number") from None


Whole = Annotated[int, BeforeValidator(_whole)]
# The bounds stand first: so they are those of JSON schema.
Count = Annotated[int, Field(ge=0, le=TIME_MAX), BeforeValidator(_whole)]
QueueId = Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_whole)]
Name = Annotated[str, Field(min_length=1, strict=True)]
_TOPIC = Flags(("-t", "--topic"))
_QUEUE = Flags(("-i", "--queue-id"), "QUEUE")
_MAX = Flags(("-m", "--max"), "MAX")


class Question(BaseModel):
    """No field but those that are named. ``command`` asks it on the command line.

    ``path`` asks it over HTTP, below /api/v1/messages; None for one whose parameters are others there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    command: ClassVar[str]
    path: ClassVar[str | None] = None
    #: Whether an index is needed to answer it, and not the log alone.
    needs_index: ClassVar[bool] = True
    #: Whether exactly one of its fields has to be given.
    is_by_one: ClassVar[bool] = False

    def answer(self, index: Any) -> Any:
        """The answer; UsageError and CorruptDataError, DiskError for what cannot be read.

        ``index`` is a QueryIndex; where none is needed, the log alone will do.
        """
        raise NotImplementedError


class InTimeRange(Question):
    """What questions about messages of a topic in a range of store times share."""

    topic: Annotated[Name, _TOPIC] = Field(description="the topic")
    begin: Annotated[Count | None, Flags(("-b", "--begin"), "MS")] = Field(
        None, description="first store time (default: none; in mode rocketmq 0)"
    )
    end: Annotated[Count, Flags(("-e", "--end"), "MS")] = Field(TIME_MAX, description="last store time (default: none)")
    max: Annotated[Whole, _MAX] = Field(64, description="most messages, the newest first (default: 64)")
    mode: Annotated[Literal["exact", "rocketmq"], Flags(("--mode",))] = Field(
        "exact", description="exact: every message that matches, once; rocketmq: what the broker itself would answer"
    )
    before: Annotated[Count | None, Flags(("--cursor",), "CURSOR")] = Field(
        None, description="go on behind an exact answer that was cut off: its cursor"
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.max < 1 and self.mode == "exact":
            raise ValueError(f"a maximum of {self.max} asks for nothing")
        if self.before is not None and self.mode != "exact":
            raise ValueError("a cursor goes on behind an exact answer, and the broker's own has none")
        check_times(self.begin or 0, self.end)
        return self

    def _find(self, index: QueryIndex, key: str, max_num: int, index_type: str | None) -> Answer:
        is_exact = self.mode == "exact"
        begin = self.begin if self.begin is not None else (TIME_MIN if is_exact else 0)
        query = KeyQuery(self.topic, key, max_num, begin, self.end, index_type, self.before)
        return (query_exact if is_exact else query_rocketmq)(index, query)


class ByKey(InTimeRange):
    """Find the messages of a topic that have a key."""

    command = "query-key"
    path = "by-key"
    key: Annotated[Name, Flags(("-k", "--key"))] = Field(description="one of the message's keys")
    index_type: Annotated[Literal["K", "U", "T"] | None, Flags(("--index-type",))] = Field(
        None, description="K: a key, U: the unique key, T: the tags; default K or U"
    )

    def answer(self, index: QueryIndex) -> Answer:
        """The messages, newest first."""
        return self._find(index, self.key, self.max, self.index_type)


class ByUniqueKey(InTimeRange):
    """Find the message that a producer gave a unique key."""

    command = "query-unique-key"
    path = "by-unique-key"
    id: Annotated[Name, Flags(("-i", "--msg-id"), "MSGID")] = Field(description="the unique key (UNIQ_KEY)")

    def answer(self, index: QueryIndex) -> Answer:
        """The messages, newest first; in rocketmq mode as many as the broker's own cap for these allows."""
        max_num = self.max if self.mode == "exact" else index.config.query.default_query_max_num
        return self._find(index, self.id, max_num, "U")


class ByQueueOffset(Question):
    """Show the messages of a queue from a queue offset on."""

    command = "query-offset"
    path = "by-queue-offset"
    topic: Annotated[Name, _TOPIC] = Field(description="the topic")
    queue: Annotated[QueueId, _QUEUE] = Field(description="the queue's number")
    offset: Annotated[Count, Flags(("-o", "--offset"), "OFFSET")] = Field(
        0, description="the first queue offset (default: 0)"
    )
    max: Annotated[Whole, _MAX] = Field(32, ge=1, description="most messages (default: 32)")

    def answer(self, index: QueryIndex) -> OffsetAnswer:
        """The messages in the order of the queue."""
        return query_offset(index, OffsetQuery(self.topic, self.queue, self.offset, self.max))


class ByTime(Question):
    """Find the queue offset of a store time, or without a queue the first message of the whole log."""

    command = "query-time"
    path = "by-time"
    time: Annotated[Count, Flags(("-s", "--timestamp"), "MS")] = Field(description="the store time")
    topic: Annotated[Name | None, _TOPIC] = Field(None, description="the topic")
    queue: Annotated[QueueId | None, _QUEUE] = Field(None, description="the queue's number")
    boundary: Annotated[Boundary, Flags(("--boundary",))] = Field(
        "lower",
        description="lower: the first message of that time or later (default); upper: the last of that time or earlier",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.topic is None) != (self.queue is None):
            raise ValueError("a queue is a topic and a queue's number: give both, or none for the whole log")
        if self.topic is None and "boundary" in self.model_fields_set:
            raise ValueError("a boundary is of a queue: in the whole log it is always the first message")
        return self

    def answer(self, index: QueryIndex) -> QueueTimeAnswer | LogTimeAnswer:
        """The queue offset, or the place in the log."""
        if self.topic is None or self.queue is None:
            return query_log_time(index, self.time)
        return query_time(index, self.topic, self.queue, self.time, self.boundary)


class ByMessage(Question):
    """Show one message."""

    command = "message"
    needs_index = False
    is_by_one = True
    id: Annotated[Name | None, Flags(("-i", "--msg-id"), "ID")] = Field(
        None, description="its offset message id, 32 or 56 hex digits"
    )
    offset: Annotated[Count | None, Flags(("-o", "--offset"), "OFFSET")] = Field(
        None, description="its physical offset"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.id is None) == (self.offset is None):
            raise ValueError("a message is known by its offset message id or by its physical offset: give one")
        if self.id is not None:
            parse_message_id(self.id)
        return self

    def answer(self, index: QueryIndex | LogView) -> Message | NotFound:
        """The message, checked by its CRCs."""
        log = index.log if isinstance(index, QueryIndex) else index
        return find_by_id(log, self.id or "") if self.offset is None else find_by_offset(log, self.offset)


def make_question(
    model: type[Q],
    given: Mapping[str, Any],
    called: Callable[[str], str] = str,
    *,
    typed: bool = False,
    hint: str = "",
) -> Q:
    """The question that is made of ``given``; UsageError, with ``hint``, for what is wrong with it.

    ``called``: what the asker calls a field. ``typed``: numbers are no texts.
    """
    try:
        return model.model_validate(given, context=TYPED if typed else None)
    except ValidationError as error:
        raise UsageError(wrong_fields(error, called)[0], hint) from None


def check_times(begin: int, end: int) -> None:
    """UsageError if the first store time is behind the last one."""
    if begin > end:
        raise UsageError(f"the first store time, {begin}, is behind the last one, {end}", "exchange them")


class Data:
    """What ``open_data`` opens, for a ``with`` block or ``close`` at the end; for one thread. Each call looks anew.

    Times in ms since the epoch, offsets as RocketMQ counts them. Answers are frozen dataclasses with ``to_dict()``.
    UsageError for arguments that are none, as by the command line.
    """

    def __init__(self, index: QueryIndex) -> None:
        self._is_closed = False
        #: For what has no method here, such as ``query_rocketmq``.
        self.index = index

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
        return self._made(ByKey, topic=topic, key=key, max=max_num, **more).answer(self._opened())

    def by_queue(self, topic: str, queue_id: int, queue_offset: int = 0, *, max_num: int = 32) -> OffsetAnswer:
        """Messages of a queue from ``queue_offset`` on; the next page begins at the answer's ``next_offset``."""
        asked = {"topic": topic, "queue": queue_id, "offset": queue_offset, "max": max_num}
        return self._made(ByQueueOffset, **asked).answer(self._opened())

    def at_time(self, topic: str, queue_id: int, timestamp: int, boundary: Boundary = "lower") -> QueueTimeAnswer:
        """The queue offset of a store time, as the broker's search finds it."""
        asked = self._made(ByTime, topic=topic, queue=queue_id, time=timestamp, boundary=boundary)
        return query_time(self._opened(), topic, queue_id, asked.time, boundary)

    def log_at_time(self, timestamp: int) -> LogTimeAnswer:
        """The first message in the log with that store time or a later one."""
        return query_log_time(self._opened(), self._made(ByTime, time=timestamp).time)

    def message(self, where: int | str) -> Message | NotFound:
        """One message, whole and checked by its CRCs: by physical offset, or by its offset message id in hex."""
        self._opened().log.begin_query()
        given = {"id": where} if isinstance(where, str) else {"offset": where}
        return self._made(ByMessage, **given).answer(self.index)

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

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _made(self, model: type[Q], **given: Any) -> Q:
        return make_question(model, given, typed=True)

    def _opened(self) -> QueryIndex:
        if self._is_closed:
            raise UsageError(f"{self.index.files.data} is closed", "open it again with open_data")
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
