"""Messages: by key, unique key, queue offset, time, and where they stand in the log.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from indexd.config import Config, OutputsConfig
from indexd.query import TIME_MIN, Data, KeyQuery, NotFound, query_rocketmq
from indexd.serve.http.answers import (
    key_row,
    message_row,
    queue_row,
    time_row,
    to_json,
)
from indexd.serve.http.bodies import Bodies
from indexd.serve.http.documented import documented
from indexd.serve.http.parameters import ByKey, ByQueueOffset, ByTime, ByUniqueKey, OneMessage, Where
from indexd.serve.http.problem import ProblemError
from indexd.serve.http.queries import Queries
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import KeyAnswer, MessageRow, QueueAnswer, TimeAnswer
from indexd.serve.queries import EMPTY_COVERED, FOUND

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
