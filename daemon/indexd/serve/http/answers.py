"""Answers as JSON: RocketMQ's names; whole numbers of 64 bits are texts, because a JavaScript number has 53 bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from indexd.commitlog.decoder import Message
from indexd.query import Answer, Coverage, Data, Hit, LogTimeAnswer, OffsetAnswer, QueueTimeAnswer
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, BEHIND_LAST, why_not_complete
from indexd.query.message import message_fields
from indexd.query.queues import NO_FOLDER
from indexd.serve.http.bodies import Bodies
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND

# ``json.dumps`` would make a new one each time.
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)
_ASCII_ENCODER = json.JSONEncoder(default=repr)
_COVERED = (ABSENT, ABSENT_BEFORE, BEHIND_LAST, NO_FOLDER)
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
    """JSON in UTF-8; what has no form there is written as Python shows it."""
    try:
        return _ENCODER.encode(row).encode()
    except UnicodeEncodeError:  # half a surrogate
        return _ASCII_ENCODER.encode(row).encode()


def json_response(row: Any) -> Response:
    """``row`` as JSON."""
    return Response(to_json(row), media_type="application/json")


def result_of(count: int, why: str | None) -> str:
    """Found, nothing there, or nothing there as far as the index speaks for the log."""
    if count:
        return FOUND
    return EMPTY_COVERED if why in _COVERED else EMPTY_UNCOVERED


def text_or_none(number: int | None) -> str | None:
    """A whole number of 64 bits."""
    return None if number is None else str(number)


def coverage_row(coverage: Coverage) -> dict[str, Any]:
    """Which part of the log an answer speaks for."""
    return {
        "begin": str(coverage.begin),
        "end": str(coverage.end),
        "logBegin": text_or_none(coverage.log_begin),
        "complete": coverage.complete,
        "why": why_not_complete(coverage),
        "uncovered": [
            {"begin": str(gap.begin), "end": str(gap.end), "reason": gap.reason} for gap in coverage.uncovered
        ],
        "daemonPid": coverage.daemon_pid,
    }


def key_row(data: Data, answer: Answer, bodies: Bodies) -> dict[str, Any]:
    """The answer to a query by key, with the result as the board counts it."""
    why = answer.why
    if not answer.hits and why is None:  # the broker's own answer never says
        why = ABSENT if answer.coverage.complete else "the broker's answer: absent from what is indexed"
    return {
        "topic": answer.query.topic,
        "key": answer.query.key,
        "indexType": answer.query.index_type,
        "result": result_of(len(answer.hits), why),
        "why": why,
        "messages": _hits(data, answer.hits, bodies),
        "truncated": answer.truncated is not None,
        "truncatedBy": answer.truncated,
        "cursor": text_or_none(answer.cursor),
        "expired": answer.expired,
        "unreadable": answer.unreadable,
        "coverage": coverage_row(answer.coverage),
    }


def queue_row(data: Data, answer: OffsetAnswer, bodies: Bodies) -> dict[str, Any]:
    """The answer to a query by queue offset."""
    query, hits = answer.query, answer.hits
    shown = _hits(data, [found.hit or Hit(found.unit.phy_offset) for found in hits], bodies)
    for row, found in zip(shown, hits, strict=True):
        row |= {
            "queueId": query.queue_id,
            "queueOffset": str(found.queue_offset),
            "tagsCode": str(found.unit.tags_code),
            "problem": found.problem,
        }
    return {
        "topic": query.topic,
        "queueId": query.queue_id,
        "queueOffset": str(query.queue_offset),
        "status": answer.status,
        "result": result_of(len(hits), answer.why),
        "why": answer.why,
        "messages": shown,
        "minOffset": str(answer.min_offset),
        "maxOffset": str(answer.max_offset),
        "nextOffset": str(answer.next_offset),
        "truncated": answer.truncated,
        "expired": answer.expired,
        "coverage": coverage_row(answer.coverage),
    }


def time_row(answer: QueueTimeAnswer | LogTimeAnswer) -> dict[str, Any]:
    """The answer to a query by time, of a queue or of the log."""
    row: dict[str, Any] = text64(answer.to_json())
    found = answer.phy_offset is not None
    head = {"result": result_of(int(found), answer.why), "why": answer.why}
    return row | head | {"coverage": coverage_row(answer.coverage)}


def message_row(message: Message, bodies: Bodies) -> dict[str, Any]:
    """One message, whole."""
    row: dict[str, Any] = text64(message_fields(message))
    return row | bodies.row(message) if bodies.are_asked else row


def _hits(data: Data, hits: Sequence[Hit], bodies: Bodies) -> list[dict[str, Any]]:
    rows = [
        {
            "phyOffset": str(hit.phy_offset),
            "storeTimestamp": text_or_none(hit.store_timestamp),
            "queueId": hit.queue_id,
            "queueOffset": text_or_none(hit.queue_offset),
            "size": hit.size,
            "keys": hit.keys,
            "uniqKey": hit.uniq_key,
            "tags": hit.tags,
        }
        for hit in hits
    ]
    if bodies.are_asked:
        return [row | _body(data, hit, bodies) for row, hit in zip(rows, hits, strict=True)]
    return rows


def _body(data: Data, hit: Hit, bodies: Bodies) -> dict[str, Any]:
    data.index.log.check()  # unpacking and writing down takes time that nothing else looks at
    if hit.size is None:
        return bodies.row(None)
    if bodies.is_full:
        return bodies.row(None) | {"bodyTruncated": True}
    found = data.message(hit.phy_offset)
    return bodies.row(found if isinstance(found, Message) else None)
