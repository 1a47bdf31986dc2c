"""Answers: the models by which they are written as JSON and described in OpenAPI, and how they are made.

Names are RocketMQ's. Whole numbers of 64 bits are texts, because a JavaScript number has 53 bits.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import to_json as pydantic_json
from starlette.responses import Response

from indexd.commitlog.decoder import Message
from indexd.query import Answer, Data, Hit, LogTimeAnswer, OffsetAnswer, QueueTimeAnswer, unpack_body
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, BEHIND_LAST
from indexd.query.message import message_fields
from indexd.query.source import NO_FOLDER
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND

Row = dict[str, Any]
_COVERED = (ABSENT, ABSENT_BEFORE, BEHIND_LAST, NO_FOLDER)
# A body stands so deep in an answer.
_DEPTH = 8
_NO_BODY = dict.fromkeys(("body", "bodyEncoding", "bodySize", "compression"))

Text64 = Annotated[
    str,
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^-?[0-9]{1,20}$",
            "description": "A whole number of 64 bits, as text",
            "examples": ["1700000000000"],
        }
    ),
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

    model_config = ConfigDict(alias_generator=to_camel, coerce_numbers_to_str=True)


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


class SegmentRow(Camel):
    """One file of the log that is there."""

    begin: Text64
    end: Text64


class Gap(SegmentRow):
    """Log bytes ``[begin, end)`` whose messages are not in the index."""

    reason: str


class CoverageRow(SegmentRow):
    """Which part of the log an answer speaks for."""

    log_begin: Text64 | None
    complete: bool = Field(
        description="Nothing that the log still holds is missing from ``[begin, end)``, nothing stands before or behind"
        " it that may be a message, and the answer was not cut off"
    )
    why: str | None = Field(description="Why it is not complete")
    uncovered: list[Annotated[Gap, BeforeValidator(lambda gap: dict(zip(Gap.model_fields, gap, strict=True)))]]
    daemon_pid: int | None


Covers = Annotated[CoverageRow, BeforeValidator(lambda row: {"why": None} | row)]


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


class Answered(Camel):
    """What every answer says."""

    result: Result
    why: Why
    coverage: Covers


class KeyAnswer(Answered):
    """Messages, the newest first."""

    topic: str
    key: str
    index_type: str | None
    messages: list[MessageHitRow] = Field(description="The ``hits``, with bodies where they were asked for")
    hits: list[HitRow]
    truncated: bool
    truncated_by: str | None
    cursor: Text64 | None = Field(description="``before`` of the query that goes on where this answer was cut off")
    expired: int = Field(description="Entries of this hash whose messages have gone with the oldest log")
    unreadable: int = Field(description="Entries of this hash that point to what is no message")


class QueueMessageRow(MessageHitRow, QueueHitRow):
    """One message of a queue."""

    tags_code: Text64


class QueueAnswer(Answered):
    """Messages in the order of the queue, which holds ``[minOffset, maxOffset)``."""

    topic: str
    queue_id: int
    queue_offset: Text64
    status: str = Field(description="RocketMQ's GetMessageStatus", examples=["FOUND"])
    messages: list[QueueMessageRow]
    hits: list[QueueHitRow]
    min_offset: Text64
    max_offset: Text64
    next_offset: Text64
    truncated: bool
    expired: int


class TimeAnswer(Answered):
    """Where a time is. Of a queue: the queue offset as the broker's search finds it; else the first message."""

    timestamp: Text64
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


class MessageRow(HitRow, BodyRow):
    """One message, whole, under RocketMQ's names."""

    offset_msg_id: str
    keys: list[str]  # type: ignore[assignment]  # apart, where the message is there
    tags_code: Text64
    flag: int
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
    coverage: Covers


class CoverageAnswer(Camel):
    """The log as the index sees it: what is there, indexed, durable, left out, and no more."""

    coverage: Covers
    durable_offset: Text64
    segment_size: Text64
    segments: list[SegmentRow] = Field(description="The newest thousand")
    segments_left_out: int


class EventsAnswer(Camel):
    """Events behind a number, the oldest first; numbers that are left out have been dropped."""

    boot_id: str
    last: int
    events: list[Row] = Field(description="Each with its number, when it was (at), kind, name and fields")


class Health(Open):
    """It is well."""

    status: Literal["ok"]
    phase: str


def written(model: type[BaseModel], row: Row) -> bytes:
    """``row`` as the model's JSON; what the row leaves out is left out."""
    return model.model_validate(row).model_dump_json(by_alias=True, exclude_unset=True).encode()


def json_response(body: bytes) -> Response:
    """JSON that is written already."""
    return Response(body, media_type="application/json")


def result_of(count: int, why: str | None) -> str:
    """Found, nothing there, or nothing there as far as the index speaks for the log."""
    if count:
        return FOUND
    return EMPTY_COVERED if why in _COVERED else EMPTY_UNCOVERED


class Bodies:
    """The bodies of one answer, in the asked form; together they are ``bytes_max`` long at most."""

    def __init__(self, form: str, bytes_max: int) -> None:
        self._form, self._left = form, bytes_max

    def rows(self, data: Data, hits: Sequence[Hit], rows: list[Row]) -> list[Row]:
        """The hits' rows with their bodies, where these are asked for."""
        if self._form == "none":
            return rows
        return [row | self._of_hit(data, hit) for row, hit in zip(rows, hits, strict=True)]

    def of(self, message: Message | None) -> Row:
        """Members of one message; nothing where none are asked for.

        What has no room is not unpacked, so that all bodies of an answer cost no more than they may be long; how long
        the whole is then is not known (null).
        """
        if self._form == "none":
            return {}
        if message is None:
            return {**_NO_BODY, "bodyTruncated": False, "bodyUnpacked": False}
        left = max(self._left, 0)
        body = unpack_body(message, left)
        data = body.data[:left]
        self._left -= len(data)
        is_cut = body.is_cut or len(data) < len(body.data)
        shown, encoding = (None, None) if is_cut and not data else _show(data, self._form, is_cut=is_cut)
        return {
            "body": shown,
            "bodyEncoding": encoding,
            "bodySize": None if body.is_cut else len(body.data),
            "bodyTruncated": is_cut,
            "compression": body.compression,
            "bodyUnpacked": body.is_unpacked,
        }

    def _of_hit(self, data: Data, hit: Hit) -> Row:
        data.index.log.check()  # unpacking and writing down takes time that nothing else looks at
        if hit.size is None:
            return self.of(None)
        if self._left <= 0:
            return self.of(None) | {"bodyTruncated": True}
        found = data.message(hit.phy_offset)
        return self.of(found if isinstance(found, Message) else None)


def _show(data: bytes, form: str, *, is_cut: bool) -> tuple[Any, str]:
    # A form that the body does not have gives way to the next one that it has.
    if form == "hex":
        return data.hex(), "hex"
    if form == "json" and not is_cut:
        try:
            value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
            json.dumps(value, allow_nan=False)  # 1e999 is no answer
            nested = value
            for _ in range(_DEPTH):
                nested = [nested]
            pydantic_json(nested)  # nor are half a surrogate and what is too deep
        except (ValueError, RecursionError):
            pass
        else:
            return value, "json"
    if form in ("json", "text") and (text := _text(data, is_cut=is_cut)) is not None:
        return text, "utf-8"
    return base64.b64encode(data).decode("ascii"), "base64"


def _text(data: bytes, *, is_cut: bool) -> str | None:
    # Cut text may end in the middle of a character, which is left out.
    for end in range(len(data), max(len(data) - (3 if is_cut else 0), 0) - 1, -1):
        try:
            text = data[:end].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in "\t\n\r" for c in text) else None
    return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_KEY_DEFAULTS = {"indexType": None, "truncatedBy": None, "cursor": None, "expired": 0, "unreadable": 0}


def key_answer(data: Data, answer: Answer, bodies: Bodies) -> tuple[bytes, str]:
    """The answer to a query by key, and its result as the board counts it."""
    why = answer.why
    if not answer.hits and why is None:  # the broker's own answer never says
        why = ABSENT if answer.coverage.complete else "the broker's answer: absent from what is indexed"
    row, result = answer.to_json(), result_of(len(answer.hits), why)
    found = {"result": result, "why": why, "messages": bodies.rows(data, answer.hits, row["hits"])}
    return written(KeyAnswer, _KEY_DEFAULTS | row | found), result


def queue_answer(data: Data, answer: OffsetAnswer, bodies: Bodies) -> tuple[bytes, str]:
    """The same for a query by queue offset."""
    result = result_of(len(answer.hits), answer.why)
    hits = [hit.hit or Hit(hit.unit.phy_offset) for hit in answer.hits]
    rows = [
        one.to_dict()
        | {
            "queueId": answer.query.queue_id,
            "queueOffset": hit.queue_offset,
            "tagsCode": hit.unit.tags_code,
            "problem": hit.problem,
        }
        for one, hit in zip(hits, answer.hits, strict=True)
    ]
    found = {"result": result, "why": answer.why, "messages": bodies.rows(data, hits, rows)}
    return written(QueueAnswer, {"expired": 0} | answer.to_json() | found), result


def time_answer(answer: QueueTimeAnswer | LogTimeAnswer) -> tuple[bytes, str]:
    """The same for a query by time, of a queue or of the log."""
    result = result_of(int(answer.phy_offset is not None), answer.why)
    return written(TimeAnswer, answer.to_json() | {"result": result, "why": answer.why}), result


def message_answer(message: Message, bodies: Bodies) -> bytes:
    """One message, whole."""
    return written(MessageRow, message_fields(message) | bodies.of(message))


# Generic rows: status, events, frontier, whose members are not all known here.

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)
_ASCII_ENCODER = json.JSONEncoder(default=repr)
#: Whole numbers that stay numbers: those of 32 bits. Every other one becomes a text.
NUMBERS = frozenset(
    {
        "pid", "daemonPid", "queueId", "size", "hashSlotNum", "indexNum", "usedSlotCount", "indexCount", "indexFiles",
        "files", "consumeQueues", "rollOvers", "lastEvent", "number", "last", "sysFlag", "flag", "reconsumeTimes",
        "magic", "bodyCrc", "bodySize", "recoveries",
    }
)  # fmt: skip


def text64(value: Any, name: str = "") -> Any:
    """``value`` with all whole numbers in it as texts, but for those whose names are in NUMBERS."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if name in NUMBERS else str(value)
    if isinstance(value, dict):
        return {key: text64(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [text64(item, name) for item in value]
    return value


def to_json(row: Any) -> bytes:
    """JSON in UTF-8 with 64-bit numbers as texts; what has no form there is written as Python shows it."""
    shown = text64(row)
    try:
        return _ENCODER.encode(shown).encode()
    except UnicodeEncodeError:  # half a surrogate
        return _ASCII_ENCODER.encode(shown).encode()
