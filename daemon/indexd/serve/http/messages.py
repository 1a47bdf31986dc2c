"""Bodies: a message's body as it was asked for, within a number of bytes.

Answers as JSON: RocketMQ's names; whole numbers of 64 bits are texts, because a JavaScript number has 53 bits.

Queries of this outlet: whatever is no answer is a problem.

Messages: by key, unique key, queue offset, time, and where they stand in the log.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.responses import Response

from indexd.commitlog.decoder import Message
from indexd.config import Config, OutputsConfig
from indexd.errors import IndexdError
from indexd.query import (
    TIME_MIN,
    Coverage,
    Data,
    Hit,
    KeyQuery,
    LogTimeAnswer,
    NotFound,
    OffsetAnswer,
    QueueTimeAnswer,
    query_rocketmq,
    unpack_body,
)
from indexd.query import Answer as QueryAnswer
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, BEHIND_LAST, why_not_complete
from indexd.query.message import message_fields
from indexd.query.source import NO_FOLDER
from indexd.serve import queries
from indexd.serve.board import Board
from indexd.serve.http.parameters import ByKey, ByQueueOffset, ByTime, ByUniqueKey, OneMessage, Where
from indexd.serve.http.problem import ProblemError, documented, of_error, stopping
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import KeyAnswer, MessageRow, QueueAnswer, TimeAnswer
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND


class Bodies:
    """The bodies of one answer; together they are ``bytes_max`` long at most."""

    def __init__(self, form: str, bytes_max: int) -> None:
        self._form, self._left = form, bytes_max

    @property
    def are_asked(self) -> bool:
        """Whether there are any to be shown."""
        return self._form != "none"

    @property
    def is_full(self) -> bool:
        """Whether no further body has room."""
        return self._left <= 0

    def row(self, message: Message | None) -> dict[str, Any]:
        """body, bodyEncoding (utf-8, json, hex, base64), bodySize (of the whole), bodyTruncated, compression and so on.

        ``body`` is null where the message is not there or no room is left. What has no room is not unpacked either, so
        that all bodies of an answer cost no more than they may be long; how long the whole is then is not known (null).
        """
        if message is None:
            return dict.fromkeys(("body", "bodyEncoding", "bodySize", "compression")) | {
                "bodyTruncated": False,
                "bodyUnpacked": False,
            }
        body = unpack_body(message, max(self._left, 0))
        data = body.data[: max(self._left, 0)]
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


def _show(data: bytes, form: str, *, is_cut: bool) -> tuple[Any, str]:
    # A form that the body does not have gives way to the next one that it has.
    if form == "hex":
        return data.hex(), "hex"
    if form == "json" and not is_cut:
        try:
            value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # 1e999 and half a surrogate are no answer
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


def key_row(data: Data, answer: QueryAnswer, bodies: Bodies) -> dict[str, Any]:
    """The answer to a query by key, with the result as the board counts it."""
    why = answer.why
    hits = [text64(hit.to_dict()) for hit in answer.hits]
    if not answer.hits and why is None:  # the broker's own answer never says
        why = ABSENT if answer.coverage.complete else "the broker's answer: absent from what is indexed"
    return {
        "topic": answer.query.topic,
        "key": answer.query.key,
        "indexType": answer.query.index_type,
        "result": result_of(len(answer.hits), why),
        "why": why,
        "messages": _with_bodies(data, hits, answer.hits, bodies),
        "hits": hits,
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
    found = [hit.hit or Hit(hit.unit.phy_offset) for hit in hits]
    shown = [
        text64(one.to_dict())
        | {
            "queueId": query.queue_id,
            "queueOffset": str(hit.queue_offset),
            "tagsCode": str(hit.unit.tags_code),
            "problem": hit.problem,
        }
        for one, hit in zip(found, hits, strict=True)
    ]
    return {
        "topic": query.topic,
        "queueId": query.queue_id,
        "queueOffset": str(query.queue_offset),
        "status": answer.status,
        "result": result_of(len(hits), answer.why),
        "why": answer.why,
        "messages": _with_bodies(data, shown, found, bodies),
        "hits": [text64(hit.to_dict(query.topic, query.queue_id)) for hit in hits],
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


def _with_bodies(data: Data, rows: list[dict[str, Any]], hits: Sequence[Hit], bodies: Bodies) -> list[dict[str, Any]]:
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


T = TypeVar("T")
_OPENING_RETRY = 5
_BUSY_RETRY = 1


class Queries:
    """One for a server; its methods belong to the server's event loop."""

    def __init__(self, config: Config, board: Board) -> None:
        self._queries = queries.Queries(config, board, config.http.http_queries_max)

    def __repr__(self) -> str:
        return repr(self._queries)

    async def ask(self, question: Callable[[Data], T]) -> T:
        """What ``question`` returns, called with an open data directory in another thread; ProblemError."""
        try:
            return await self._queries.ask(question)
        except queries.NotAnsweredError as error:
            raise _of_no_answer(error) from error
        except IndexdError as error:
            raise of_error(error) from error

    async def query(self, question: Callable[[Data], T], result: Callable[[T], str]) -> T:
        """The same for a query proper: counted on the board by what ``result`` says of the answer, and timed."""
        try:
            return await self._queries.query(question, result)
        except queries.NotAnsweredError as error:
            raise _of_no_answer(error) from error
        except IndexdError as error:
            raise of_error(error) from error

    def stop(self) -> None:
        """What waits and what comes is refused from now on, and what runs ends where it next looks at a message."""
        self._queries.stop()

    def close(self) -> int:
        """Close all files behind a ``stop``, in any thread; how many queries are left behind after two seconds."""
        return self._queries.close()


def _of_no_answer(error: queries.NotAnsweredError) -> ProblemError:
    detail = str(error)
    if isinstance(error, queries.NotOpenError):
        members = {"phase": error.phase, "recovering": error.recovering} if error.hint is None else {"hint": error.hint}
        return ProblemError(503, "not-open-yet", detail, members, retry=_OPENING_RETRY)
    if isinstance(error, queries.CrowdedError):
        return ProblemError(503, "busy", detail, retry=_BUSY_RETRY, is_refusal=True)
    if isinstance(error, queries.StoppingError):
        return stopping()
    hint = "ask for fewer messages (max), a shorter time (begin, end), or without bodies"
    return ProblemError(503, "too-long", detail, {"hint": hint}, retry=_BUSY_RETRY)


_ID_LENGTH_MIN = 32
_UNIQUE = "U"
Question = Callable[[Data], dict[str, Any]]
Answer = Callable[[Question], Awaitable[Response]]


def message_router(config: Config, queries: Queries) -> APIRouter:
    """The routes; together the bodies of an answer have ``http_body_max`` bytes at most."""
    router = APIRouter(prefix="/api/v1/messages", route_class=StrictRoute, tags=["messages"])
    body_max = config.http.http_body_max

    async def answer(question: Question) -> Response:
        # Made into bytes where it was found: the event loop has others to serve.
        def shown(data: Data) -> tuple[bytes, str]:
            row = question(data)
            return to_json(row), row["result"]

        body, _ = await queries.query(shown, lambda found: found[1])
        return Response(body, media_type="application/json")

    _add_keys(router, answer, body_max)
    _add_places(router, answer, config.outputs, body_max)
    _add_one(router, queries, body_max)
    return router


def _add_keys(router: APIRouter, answer: Answer, body_max: int) -> None:
    @router.get(
        "/by-key",
        summary="Messages of a topic that have a key",
        **documented(KeyAnswer, "The messages, the newest first, or why there are none", 409),
    )
    async def by_key(asked: Annotated[ByKey, Query()]) -> Response:
        """Exact by default: every message that matches, once, and none that does not.

        In mode rocketmq it is what the broker itself would answer, collisions, repeats and misses included.
        """
        _check_times(asked)
        if asked.mode == "rocketmq" and asked.before is not None:
            raise ProblemError(409, "parameters", "the broker's own answer has no pages: leave before or mode out")

        def question(data: Data) -> dict[str, Any]:
            if asked.mode == "rocketmq":
                query = KeyQuery(asked.topic, asked.key, asked.max, asked.begin or 0, asked.end, asked.index_type)
                found = query_rocketmq(data.index, query)
            else:
                found = data.by_key(
                    asked.topic, asked.key, max_num=asked.max, begin=_begin(asked), end=asked.end,
                    index_type=asked.index_type, before=asked.before,
                )  # fmt: skip
            return key_row(data, found, Bodies(asked.body, body_max))

        return await answer(question)

    @router.get(
        "/by-unique-key",
        summary="The message that a producer gave a unique key",
        **documented(KeyAnswer, "The message, more than one if it was sent again, or why there is none", 409),
    )
    async def by_unique_key(asked: Annotated[ByUniqueKey, Query()]) -> Response:
        """The unique key is the id that a producer's send returns (UNIQ_KEY)."""
        _check_times(asked)

        def question(data: Data) -> dict[str, Any]:
            found = data.by_key(
                asked.topic, asked.id, max_num=asked.max, begin=_begin(asked), end=asked.end, index_type=_UNIQUE
            )
            return key_row(data, found, Bodies(asked.body, body_max))

        return await answer(question)


def _begin(asked: ByKey | ByUniqueKey) -> int:
    return TIME_MIN if asked.begin is None else asked.begin


def _check_times(asked: ByKey | ByUniqueKey) -> None:
    if asked.begin is not None and asked.begin > asked.end:
        raise ProblemError(409, "parameters", f"begin, {asked.begin}, is later than end, {asked.end}: turn them round")


def _add_places(router: APIRouter, answer: Answer, outputs: OutputsConfig, body_max: int) -> None:
    @router.get(
        "/by-queue-offset",
        summary="Messages of a queue from an offset on",
        **documented(QueueAnswer, "The messages in the queue's order, or why there are none", 404),
    )
    async def by_queue_offset(asked: Annotated[ByQueueOffset, Query()]) -> Response:
        """As a consumer's pull sees it; ``nextOffset`` is the offset of the next page."""
        if not outputs.consume_queue:
            raise ProblemError(404, "not-built", "no ConsumeQueues are built (consume_queue = false)")

        def question(data: Data) -> dict[str, Any]:
            found = data.by_queue(asked.topic, asked.queue, asked.offset, max_num=asked.max)
            return queue_row(data, found, Bodies(asked.body, body_max))

        return await answer(question)

    @router.get(
        "/by-time",
        summary="Where a time is in a queue, or in the whole log",
        **documented(TimeAnswer, "The place, or why there is none", 404, 409),
    )
    async def by_time(asked: Annotated[ByTime, Query()]) -> Response:
        """With topic and queue, the queue offset that the broker's search finds; without, the log's first message
        that was stored then or later.
        """
        if (asked.topic is None) != (asked.queue is None):
            raise ProblemError(409, "parameters", "topic and queue belong together: give both or none")
        if not (outputs.sparse if asked.topic is None else outputs.consume_queue):
            what = "sparse indexes are" if asked.topic is None else "ConsumeQueues are"
            raise ProblemError(404, "not-built", f"no {what} built (sparse, consume_queue)")

        def question(data: Data) -> dict[str, Any]:
            if asked.topic is not None and asked.queue is not None:
                return time_row(data.at_time(asked.topic, asked.queue, asked.time, asked.boundary))
            return time_row(data.log_at_time(asked.time))

        return await answer(question)


def _add_one(router: APIRouter, queries: Queries, body_max: int) -> None:
    @router.get(
        "/{where}",
        summary="The message at a physical offset, or with an offset message id",
        **documented(MessageRow, "The message, whole and checked by its CRCs", 404),
    )
    async def one(where: Where, asked: Annotated[OneMessage, Query()]) -> Response:
        """Every field, the properties, and the body as text where it is such."""
        place: int | str = where if len(where) >= _ID_LENGTH_MIN else int(where)

        def question(data: Data) -> tuple[bytes | str, str]:
            if isinstance(place, int) and place >= 1 << 63:
                return f"no message at physical offset {place}: it has more than 64 bits", EMPTY_COVERED
            found = data.message(place)
            if isinstance(found, NotFound):
                return found.reason, EMPTY_COVERED  # it was the log itself that was asked
            return to_json(message_row(found, Bodies(asked.body, body_max))), FOUND

        body, result = await queries.query(question, lambda found: found[1])
        if isinstance(body, str):
            raise ProblemError(404, "no-message", body, {"result": result})
        return Response(body, media_type="application/json")
