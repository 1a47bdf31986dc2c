"""The questions that every surface asks: their fields' names, bounds, defaults and help, and how each is answered.

The command line makes its options from these models. The fields are named as the parameters of HTTP are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from indexd.errors import UsageError
from indexd.query.answer import TIME_MAX, TIME_MIN, Answer, KeyQuery
from indexd.query.by_key import query_exact, query_rocketmq
from indexd.query.by_queue import OffsetAnswer, OffsetQuery, query_offset
from indexd.query.by_time import LogTimeAnswer, QueueTimeAnswer, query_log_time, query_time
from indexd.query.source import QueryIndex


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of the command line that give a field, and what help calls its value."""

    names: tuple[str, ...]
    metavar: str | None = None


Topic = Annotated[str, Flags(("-t", "--topic"))]
Count = Annotated[int, Field(ge=0, le=TIME_MAX)]
QueueId = Annotated[int, Field(ge=0, le=2**31 - 1), Flags(("-i", "--queue-id"), "QUEUE")]
Max = Annotated[int, Flags(("-m", "--max"), "MAX")]
_TOPIC = Field(min_length=1, description="the topic")


class Question(BaseModel):
    """No field but those that are named."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class _InTime(Question):
    topic: Topic = _TOPIC
    begin: Annotated[Count | None, Flags(("-b", "--begin"), "MS")] = Field(
        None, description="first store time (default: none; in mode rocketmq 0)"
    )
    end: Annotated[Count, Flags(("-e", "--end"), "MS")] = Field(TIME_MAX, description="last store time (default: none)")
    max: Max = Field(64, description="most messages, the newest first (default: 64)")
    mode: Annotated[Literal["exact", "rocketmq"], Flags(("--mode",))] = Field(
        "exact", description="exact: every message that matches, once; rocketmq: what the broker itself would answer"
    )
    before: Annotated[Count | None, Flags(("--cursor",), "CURSOR")] = Field(
        None, description="go on behind an exact answer that was cut off: its cursor"
    )

    def _find(self, index: QueryIndex, key: str, max_num: int, index_type: str | None) -> Answer:
        is_exact = self.mode == "exact"
        if self.max < 1 and is_exact:
            raise UsageError(f"-m {self.max} asks for nothing", "ask for at least 1")
        if self.before is not None and not is_exact:
            raise UsageError(
                "--cursor goes on behind an exact answer, and the broker's own has none", "leave --mode out"
            )
        begin = self.begin if self.begin is not None else (TIME_MIN if is_exact else 0)
        check_times(begin, self.end)
        query = KeyQuery(self.topic, key, max_num, begin, self.end, index_type, self.before)
        return (query_exact if is_exact else query_rocketmq)(index, query)


class ByKey(_InTime):
    """Messages of a topic that have a key."""

    key: Annotated[str, Flags(("-k", "--key"))] = Field(min_length=1, description="one of the message's keys")
    index_type: Annotated[Literal["K", "U", "T"] | None, Flags(("--index-type",))] = Field(
        None, description="K: a key, U: the unique key, T: the tags; default K or U"
    )

    def ask(self, index: QueryIndex) -> Answer:
        """The messages, newest first. UsageError."""
        return self._find(index, self.key, self.max, self.index_type)


class ByUniqueKey(_InTime):
    """The message that a producer gave a unique key."""

    id: Annotated[str, Flags(("-i", "--msg-id"), "MSGID")] = Field(
        min_length=1, description="the unique key (UNIQ_KEY)"
    )

    def ask(self, index: QueryIndex) -> Answer:
        """The messages, newest first; in rocketmq mode as many as the broker's own cap for these allows. UsageError."""
        max_num = self.max if self.mode == "exact" else index.config.query.default_query_max_num
        return self._find(index, self.id, max_num, "U")


class ByQueueOffset(Question):
    """Messages of a queue from an offset on."""

    topic: Topic = _TOPIC
    queue: QueueId = Field(description="the queue's number")
    offset: Annotated[Count, Flags(("-o", "--offset"), "OFFSET")] = Field(description="the first queue offset")
    max: Max = Field(32, ge=1, description="most messages (default: 32)")

    def ask(self, index: QueryIndex) -> OffsetAnswer:
        """The messages in the order of the queue. UsageError."""
        return query_offset(index, OffsetQuery(self.topic, self.queue, self.offset, self.max))


class ByTime(Question):
    """Where a time is: in a queue, or without topic and queue in the whole log."""

    time: Annotated[Count, Flags(("-s", "--timestamp"), "MS")] = Field(description="the store time")
    topic: Topic | None = Field(None, min_length=1, description="the topic")
    queue: QueueId | None = Field(None, description="the queue's number")
    boundary: Annotated[Literal["lower", "upper"], Flags(("--boundary",))] = Field(
        "lower",
        description="lower: the first message of that time or later (default); upper: the last of that time or earlier",
    )

    def ask(self, index: QueryIndex) -> QueueTimeAnswer | LogTimeAnswer:
        """The queue offset, or the place in the log. UsageError."""
        if self.topic is None or self.queue is None:
            return query_log_time(index, self.time)
        return query_time(index, self.topic, self.queue, self.time, self.boundary)


def check_times(begin: int, end: int) -> None:
    """UsageError if the first store time is behind the last one."""
    if begin > end:
        raise UsageError(f"the first store time, {begin}, is behind the last one, {end}", "exchange them")
