"""Answers: how what was found is written as JSON, under RocketMQ's names.

Whole numbers of 64 bits are texts, because a JavaScript number has 53 bits.
"""

from __future__ import annotations

import base64
import json
from codecs import getincrementaldecoder
from contextlib import suppress
from typing import Any

from pydantic_core import to_json as write_json
from starlette.responses import Response

from indexd.commitlog.decoder import Message
from indexd.query import Answer, Coverage, Data, OffsetAnswer, unpack_body
from indexd.query.source import ABSENT
from indexd.serve.queries import result_of

Row = dict[str, Any]
_NO_BODY = dict.fromkeys(("body", "bodyEncoding", "bodySize", "compression"))
#: Whole numbers that stay numbers: those of 32 bits. Every other one becomes a text.
NUMBERS = frozenset(
    {
        "pid", "daemonPid", "queueId", "size", "hashSlotNum", "indexNum", "usedSlotCount", "indexCount", "indexFiles",
        "files", "consumeQueues", "rollOvers", "lastEvent", "number", "last", "sysFlag", "flag", "reconsumeTimes",
        "magic", "bodyCrc", "bodySize", "recoveries",
    }
)  # fmt: skip
#: The same where messages and files are listed.
OF_LISTS = NUMBERS | {"expired", "unreadable", "entries", "total", "segmentsLeftOut"}
# Of an answer's own members, those of the command line that HTTP has under other names.
_NOT_SHOWN = frozenset(
    {"phyOffsets", "storeTimestamps", "indexLastUpdateTimestamp", "indexLastUpdatePhyoffset", "problems"}
)


def text64(value: Any, name: str = "", numbers: frozenset[str] = NUMBERS) -> Any:
    """``value`` with all whole numbers in it as texts, but for those whose names are in ``numbers``, and bodies."""
    if isinstance(value, dict):
        # Most are single values: no call each.
        return {
            key: (item if key in numbers else str(item))
            if type(item) is int
            else text64(item, key, numbers)
            if isinstance(item, dict | list | tuple) and key != "body"
            else item
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [text64(item, name, numbers) for item in value]
    return str(value) if type(value) is int and name not in numbers else value


def to_json(row: Any, numbers: frozenset[str] = NUMBERS) -> bytes:
    """JSON in UTF-8 with 64-bit numbers as texts; what has no form there is written as Python shows it."""
    shown = text64(row, numbers=numbers)
    try:
        return write_json(shown, fallback=repr)
    except ValueError:  # half a surrogate
        return json.dumps(shown, default=repr).encode()


def json_response(body: bytes) -> Response:
    """JSON that is written already."""
    return Response(body, media_type="application/json")


def coverage_row(coverage: Coverage) -> Row:
    """Which part of the log an answer speaks for."""
    gaps = [{"begin": gap.begin, "end": gap.end, "reason": gap.reason} for gap in coverage.uncovered]
    return {"why": None, **coverage.to_json(), "uncovered": gaps}


class Bodies:
    """The bodies of one answer, in the asked form; together they are ``bytes_max`` long at most."""

    def __init__(self, form: str, bytes_max: int) -> None:
        self._form, self._left = form, bytes_max

    def rows(self, data: Data, rows: list[Row]) -> list[Row]:
        """The hits' rows with their bodies, where these are asked for."""
        return rows if self._form == "none" else [row | self._of_hit(data, row) for row in rows]

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

    def _of_hit(self, data: Data, row: Row) -> Row:
        data.index.log.check()  # unpacking and writing down takes time that nothing else looks at
        has_room = self._left > 0
        found = data.message(row["phyOffset"]) if has_room and row["size"] is not None else None
        shown = self.of(found if isinstance(found, Message) else None)
        return shown if has_room or row["size"] is None else shown | {"bodyTruncated": True}


def _show(data: bytes, form: str, *, is_cut: bool) -> tuple[Any, str]:
    # A form that the body does not have gives way to the next one that it has.
    if form == "hex":
        return data.hex(), "hex"
    if form == "json" and not is_cut:
        with suppress(ValueError, RecursionError):  # NaN, 1e999, half a surrogate and what is too deep are no answer
            value = json.loads(data.decode("utf-8"))
            json.dumps([[[[[[[[value]]]]]]]], ensure_ascii=False, allow_nan=False).encode()
            return value, "json"
    if form in ("json", "text"):
        with suppress(UnicodeDecodeError):
            # Cut text may end in the middle of a character, which is left out.
            text = getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
            if all(c.isprintable() or c in "\t\n\r" for c in text):
                return text, "utf-8"
    return base64.b64encode(data).decode("ascii"), "base64"


_KEY_DEFAULTS = {"indexType": None, "truncatedBy": None, "cursor": None, "expired": 0, "unreadable": 0}


def key_answer(data: Data, answer: Answer, bodies: Bodies) -> tuple[bytes, str]:
    """The answer to a query by key, and its result as the status counts it."""
    why = answer.why
    if not answer.hits and why is None:  # the broker's own answer never says
        why = ABSENT if answer.coverage.complete else "the broker's answer: absent from what is indexed"
    row = _KEY_DEFAULTS | answer.to_dict()
    return _answered(row, why, answer.coverage, messages=bodies.rows(data, row["hits"]))


def queue_answer(data: Data, answer: OffsetAnswer, bodies: Bodies) -> tuple[bytes, str]:
    """The same for a query by queue offset."""
    row = {"expired": 0} | answer.to_dict()
    rows = [
        shown | {"tagsCode": hit.unit.tags_code, "problem": hit.problem}
        for shown, hit in zip(row["hits"], answer.hits, strict=True)
    ]
    return _answered(row, answer.why, answer.coverage, messages=bodies.rows(data, rows))


def plain_answer(_: Data, answer: Any, __: Bodies) -> tuple[bytes, str]:
    """The same for any other question: what its ``to_dict`` says."""
    row = answer.to_dict()
    return _answered(row, row.get("why"), answer.coverage, NUMBERS)


def _answered(
    row: Row, why: str | None, coverage: Coverage, numbers: frozenset[str] = OF_LISTS, **more: Any
) -> tuple[bytes, str]:
    result = result_of(len(row["hits"]), why)
    shown = {name: value for name, value in row.items() if name not in _NOT_SHOWN}
    said = {"result": result, "why": why, "coverage": coverage_row(coverage)}
    return to_json(shown | said | more, numbers), result
