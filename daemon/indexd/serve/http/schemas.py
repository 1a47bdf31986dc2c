"""Schemas: the answers as OpenAPI describes them. Nothing passes through these models: they are the documentation.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Text64 = Annotated[
    str, Field(pattern=r"^-?[0-9]{1,20}$", description="A whole number of 64 bits, as text", examples=["1700000000000"])
]
Result = Annotated[
    Literal["found", "empty_covered", "empty_uncovered"],
    Field(
        description="empty_covered: there is none, and the index speaks for the whole log; empty_uncovered: none was"
        " found, and ``why`` says what of the log the answer does not speak for"
    ),
]
Why = Annotated[
    str | None, Field(description="Why the answer is empty: absent, not yet indexed, expired, ...", examples=["absent"])
]


class Camel(BaseModel):
    """Its fields have RocketMQ's names, snake_cased here as everywhere and camelCased in the JSON."""

    model_config = ConfigDict(alias_generator=to_camel)


class Open(Camel):
    """With further members."""

    model_config = ConfigDict(extra="allow")


class Problem(Open):
    """Every answer that is none (RFC 9457)."""

    type: str = Field(examples=["urn:rocketmq-indexd:problem:parameters"])
    title: str
    status: int
    detail: str = Field(description="What is the matter, in words")
    instance: str = Field(description="The path that was asked for")
    hint: str | None = Field(None, description="What an operator does next")
    problems: list[str] = Field([], description="What is wrong with the parameters, one by one")


class Gap(Camel):
    """Log bytes ``[begin, end)`` whose messages are not in the index."""

    begin: Text64
    end: Text64
    reason: str


class CoverageRow(Camel):
    """Which part of the log an answer speaks for."""

    begin: Text64
    end: Text64
    log_begin: Text64 | None
    complete: bool = Field(
        description="Nothing that the log still holds is missing from ``[begin, end)``, nothing stands before or behind"
        " it that may be a message, and the answer was not cut off"
    )
    why: str | None = Field(description="Why it is not complete")
    uncovered: list[Gap]
    daemon_pid: int | None


class BodyRow(Camel):
    """A message's body, where it was asked for."""

    body: Any = Field(None, description="Text, or a JSON value where ``bodyEncoding`` says so")
    body_encoding: Literal["utf-8", "json", "hex", "base64"] | None = None
    body_size: int | None = Field(None, description="Bytes of the whole body; null where it was not unpacked whole")
    body_truncated: bool = False
    body_unpacked: bool = Field(False, description="It is stored compressed and shown unpacked")
    compression: str | None = None


class HitRow(Camel):
    """One message without its body; null where it could not be read."""

    phy_offset: Text64
    topic: str | None
    queue_id: int | None
    queue_offset: Text64 | None
    store_timestamp: Text64 | None
    born_timestamp: Text64 | None
    tags: str | None
    keys: str | None = Field(description="The property KEYS, as the producer wrote it")
    uniq_key: str | None
    size: int | None
    sys_flag: int | None
    born_host: str | None = Field(examples=["127.0.0.1:50936"])
    store_host: str | None


class QueueHitRow(HitRow):
    """The same by its place in a queue; with a ``problem``, only what the queue knows of the message."""

    problem: str | None = Field(None, description="What does not fit between queue and log")


class MessageHitRow(HitRow, BodyRow):
    """The same with its body, where it was asked for."""


class KeyAnswer(Camel):
    """Messages, the newest first."""

    topic: str
    key: str
    index_type: str | None
    result: Result
    why: Why
    messages: list[MessageHitRow] = Field(description="The ``hits``, with bodies where they were asked for")
    hits: list[HitRow]
    truncated: bool
    truncated_by: str | None
    cursor: Text64 | None = Field(description="``before`` of the query that goes on where this answer was cut off")
    expired: int = Field(description="Entries of this hash whose messages have gone with the oldest log")
    unreadable: int = Field(description="Entries of this hash that point to what is no message")
    coverage: CoverageRow


class QueueMessageRow(MessageHitRow):
    """One message of a queue; ``problem`` says what does not fit between queue and log."""

    tags_code: Text64
    problem: str | None


class QueueAnswer(Camel):
    """Messages in the order of the queue, which holds ``[minOffset, maxOffset)``."""

    topic: str
    queue_id: int
    queue_offset: Text64
    status: str = Field(description="RocketMQ's GetMessageStatus", examples=["FOUND"])
    result: Result
    why: Why
    messages: list[QueueMessageRow]
    hits: list[QueueHitRow]
    min_offset: Text64
    max_offset: Text64
    next_offset: Text64
    truncated: bool
    expired: int
    coverage: CoverageRow


class TimeAnswer(Camel):
    """Where a time is. Of a queue: the queue offset as the broker's search finds it; else the first message."""

    timestamp: Text64
    result: Result
    why: Why
    phy_offset: Text64 | None
    store_timestamp: Text64 | None
    topic: str | None = None
    queue_id: int | None = None
    boundary: str | None = None
    queue_offset: Text64 | None = None
    min_offset: Text64 | None = None
    max_offset: Text64 | None = None
    segment: Text64 | None = None
    scanned: Text64 | None = None
    unreadable: Text64 | None = None
    hits: list[QueueHitRow] = Field(description="The message that stands there, or none")
    coverage: CoverageRow


class MessageRow(BodyRow):
    """One message, whole, under RocketMQ's names."""

    phy_offset: Text64
    size: int
    offset_msg_id: str
    topic: str
    queue_id: int
    queue_offset: Text64
    store_timestamp: Text64
    born_timestamp: Text64
    store_host: str
    born_host: str
    keys: list[str]
    uniq_key: str | None
    tags: str | None
    tags_code: Text64
    flag: int
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: Text64
    magic: int
    body_crc: int
    properties: dict[str, str]


class IndexFileRow(Camel):
    """An index file and its header."""

    name: str
    size: Text64
    full: bool
    durable: bool = Field(description="The frontier names it: it was there at the last checkpoint")
    entries: int
    fill_ratio: float
    begin_timestamp: Text64
    end_timestamp: Text64
    begin_phy_offset: Text64
    end_phy_offset: Text64
    used_slot_count: int
    index_count: int
    hash_slot_num: int
    index_num: int


class Topics(Camel):
    """Topics in the order of their names."""

    topics: list[str]
    total: int = Field(description="How many begin so")


class IndexFiles(Camel):
    """All index files, the oldest first."""

    index_files: list[IndexFileRow]
    coverage: CoverageRow


class SegmentRow(Camel):
    """One file of the log that is there."""

    begin: Text64
    end: Text64


class CoverageAnswer(Camel):
    """The log as the index sees it: what is there, indexed, durable, left out, and no more."""

    coverage: CoverageRow
    durable_offset: Text64
    segment_size: Text64
    segments: list[SegmentRow] = Field(description="The newest thousand")
    segments_left_out: int


class Recovery(Open):
    """The recovery that is under way, and the last one."""

    phase: str
    recovering: dict[str, Any] | None
    remaining_bytes: Text64 | None
    last_recovery: dict[str, Any] | None


class FrontierRow(Open):
    """What is durable: the index is trusted so far after a crash."""

    phy_offset: Text64
    begin_offset: Text64
    store_timestamp: Text64
    messages: Text64
    flavour: str
    uncovered: list[Gap]


class StatusRow(Open):
    """All figures of the daemon. Whole numbers are texts, but for those of 32 bits (pid, hashSlotNum, ...)."""

    version: str
    pid: int
    boot_id: str
    phase: str = Field(examples=["running"])


class EventRow(Camel):
    """One event of the log; its other fields are in ``fields``."""

    number: int
    at: Text64
    kind: str
    name: str
    fields: dict[str, Any]


class EventsAnswer(Camel):
    """Events behind a number, the oldest first; numbers that are left out have been dropped."""

    boot_id: str
    last: int
    events: list[EventRow]


class Health(Open):
    """It is well."""

    status: Literal["ok"]
    phase: str
