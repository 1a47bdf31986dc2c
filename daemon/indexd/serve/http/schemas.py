"""Schemas: the answers as OpenAPI describes them. Nothing passes through these models: they are the documentation.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class Problem(BaseModel):
    """Every answer that is none (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:rocketmq-indexd:problem:parameters"])
    title: str
    status: int
    detail: str = Field(description="What is the matter, in words")
    instance: str = Field(description="The path that was asked for")
    hint: str | None = Field(None, description="What an operator does next")
    problems: list[str] = Field([], description="What is wrong with the parameters, one by one")


class Gap(BaseModel):
    """Log bytes ``[begin, end)`` whose messages are not in the index."""

    begin: Text64
    end: Text64
    reason: str


class CoverageRow(BaseModel):
    """Which part of the log an answer speaks for."""

    begin: Text64
    end: Text64
    logBegin: Text64 | None  # noqa: N815 - as it stands in the JSON, here and below
    complete: bool = Field(description="No message stands behind ``end``")
    uncovered: list[Gap]
    daemonPid: int | None  # noqa: N815


class BodyRow(BaseModel):
    """A message's body, where it was asked for."""

    body: Any = Field(None, description="Text, or a JSON value where ``bodyEncoding`` says so")
    bodyEncoding: Literal["utf-8", "json", "hex", "base64"] | None = None  # noqa: N815
    bodySize: int | None = Field(None, description="Bytes of the whole body")  # noqa: N815
    bodyTruncated: bool = False  # noqa: N815
    bodyUnpacked: bool = Field(False, description="It is stored compressed and shown unpacked")  # noqa: N815
    compression: str | None = None


class HitRow(BodyRow):
    """One message of a listing; null where it could not be read."""

    phyOffset: Text64  # noqa: N815
    storeTimestamp: Text64 | None  # noqa: N815
    queueId: int | None  # noqa: N815
    queueOffset: Text64 | None  # noqa: N815
    size: int | None
    keys: str | None
    uniqKey: str | None  # noqa: N815
    tags: str | None


class KeyAnswer(BaseModel):
    """Messages, the newest first."""

    topic: str
    key: str
    indexType: str | None  # noqa: N815
    result: Result
    why: Why
    messages: list[HitRow]
    truncated: bool
    truncatedBy: str | None  # noqa: N815
    cursor: Text64 | None = Field(description="``before`` of the query that goes on where this answer was cut off")
    expired: int = Field(description="Entries of this hash whose messages have gone with the oldest log")
    unreadable: int = Field(description="Entries of this hash that point to what is no message")
    coverage: CoverageRow


class QueueHitRow(HitRow):
    """One message of a queue; ``problem`` says what does not fit between queue and log."""

    tagsCode: Text64  # noqa: N815
    problem: str | None


class QueueAnswer(BaseModel):
    """Messages in the order of the queue, which holds ``[minOffset, maxOffset)``."""

    topic: str
    queueId: int  # noqa: N815
    queueOffset: Text64  # noqa: N815
    status: str = Field(description="RocketMQ's GetMessageStatus", examples=["FOUND"])
    result: Result
    why: Why
    messages: list[QueueHitRow]
    minOffset: Text64  # noqa: N815
    maxOffset: Text64  # noqa: N815
    nextOffset: Text64  # noqa: N815
    truncated: bool
    expired: int
    coverage: CoverageRow


class TimeAnswer(BaseModel):
    """Where a time is. Of a queue: the queue offset as the broker's search finds it; else the first message."""

    timestamp: Text64
    result: Result
    why: Why
    phyOffset: Text64 | None  # noqa: N815
    storeTimestamp: Text64 | None  # noqa: N815
    topic: str | None = None
    queueId: int | None = None  # noqa: N815
    boundary: str | None = None
    queueOffset: Text64 | None = None  # noqa: N815
    minOffset: Text64 | None = None  # noqa: N815
    maxOffset: Text64 | None = None  # noqa: N815
    segment: Text64 | None = None
    scanned: Text64 | None = None
    unreadable: Text64 | None = None
    coverage: CoverageRow


class MessageRow(BodyRow):
    """One message, whole, under RocketMQ's names."""

    phyOffset: Text64  # noqa: N815
    size: int
    offsetMsgId: str  # noqa: N815
    topic: str
    queueId: int  # noqa: N815
    queueOffset: Text64  # noqa: N815
    storeTimestamp: Text64  # noqa: N815
    bornTimestamp: Text64  # noqa: N815
    storeHost: str  # noqa: N815
    bornHost: str  # noqa: N815
    keys: list[str]
    uniqKey: str | None  # noqa: N815
    tags: str | None
    tagsCode: Text64  # noqa: N815
    flag: int
    sysFlag: int  # noqa: N815
    reconsumeTimes: int  # noqa: N815
    preparedTransactionOffset: Text64  # noqa: N815
    magic: int
    bodyCrc: int  # noqa: N815
    properties: dict[str, str]


class IndexFileRow(BaseModel):
    """An index file and its header."""

    name: str
    size: Text64
    full: bool
    durable: bool = Field(description="The frontier names it: it was there at the last checkpoint")
    entries: int
    fillRatio: float  # noqa: N815
    beginTimestamp: Text64  # noqa: N815
    endTimestamp: Text64  # noqa: N815
    beginPhyOffset: Text64  # noqa: N815
    endPhyOffset: Text64  # noqa: N815
    usedSlotCount: int  # noqa: N815
    indexCount: int  # noqa: N815
    hashSlotNum: int  # noqa: N815
    indexNum: int  # noqa: N815


class IndexFiles(BaseModel):
    """All index files, the oldest first."""

    indexFiles: list[IndexFileRow]  # noqa: N815
    coverage: CoverageRow


class SegmentRow(BaseModel):
    """One file of the log that is there."""

    begin: Text64
    end: Text64


class CoverageAnswer(BaseModel):
    """The log as the index sees it: what is there, indexed, durable, left out, and no more."""

    coverage: CoverageRow
    durableOffset: Text64  # noqa: N815
    segmentSize: Text64  # noqa: N815
    segments: list[SegmentRow] = Field(description="The newest thousand")
    segmentsLeftOut: int  # noqa: N815


class Recovery(BaseModel):
    """The recovery that is under way, and the last one."""

    model_config = ConfigDict(extra="allow")

    phase: str
    recovering: dict[str, Any] | None
    remainingBytes: Text64 | None  # noqa: N815
    lastRecovery: dict[str, Any] | None  # noqa: N815


class FrontierRow(BaseModel):
    """What is durable: the index is trusted so far after a crash."""

    model_config = ConfigDict(extra="allow")

    phyOffset: Text64  # noqa: N815
    beginOffset: Text64  # noqa: N815
    storeTimestamp: Text64  # noqa: N815
    messages: Text64
    flavour: str
    uncovered: list[Gap]


class StatusRow(BaseModel):
    """All figures of the daemon. Whole numbers are texts, but for those of 32 bits (pid, hashSlotNum, ...)."""

    model_config = ConfigDict(extra="allow")

    version: str
    pid: int
    bootId: str  # noqa: N815
    phase: str = Field(examples=["running"])


class EventRow(BaseModel):
    """One event of the log; its other fields are in ``fields``."""

    number: int
    at: Text64
    kind: str
    name: str
    fields: dict[str, Any]


class EventsAnswer(BaseModel):
    """Events behind a number, the oldest first; numbers that are left out have been dropped."""

    bootId: str  # noqa: N815
    last: int
    events: list[EventRow]


class Health(BaseModel):
    """It is well."""

    model_config = ConfigDict(extra="allow")

    status: Literal["ok"]
    phase: str
