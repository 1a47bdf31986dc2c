"""Problems: every answer that is none, as application/problem+json (RFC 9457), from whatever went wrong.

How a route's answers are described in OpenAPI.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError, UsageError

MEDIA_TYPE = "application/problem+json"
ALLOWED = "GET, HEAD"
_INSTANCE_MAX = 200
_STOPPING_RETRY = 5
_TYPE = "urn:rocketmq-indexd:problem:"


class ProblemError(Exception):
    """An answer that is none. ``slug`` ends its type, ``members`` go into its object, ``retry`` is in seconds.

    ``closes``: the connection is not kept, so that those who are refused hold none. ``is_refusal``: nothing failed, it
    was only not the time to ask.
    """

    def __init__(
        self,
        status: int,
        slug: str,
        detail: str,
        members: Mapping[str, Any] | None = None,
        retry: int | None = None,
        *,
        closes: bool = False,
        is_refusal: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.detail, self.retry = status, slug, detail, retry
        self.closes, self.is_refusal = closes, is_refusal
        self.members = dict(members or {})

    @property
    def title(self) -> str:
        """The status in words."""
        return HTTPStatus(self.status).phrase

    def body(self, instance: str) -> bytes:
        """The object; ``instance`` is the path that was asked for, of which the beginning is enough."""
        row = {
            "type": _TYPE + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance[:_INSTANCE_MAX],
        }
        return json.dumps(row | self.members).encode()

    def headers(self) -> dict[str, str]:
        """Those that belong to the status."""
        headers = {} if self.retry is None else {"retry-after": str(self.retry)}
        if self.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ALLOWED
        if self.closes:
            headers["connection"] = "close"
        return headers

    def response(self, instance: str) -> Response:
        """The whole answer."""
        return Response(self.body(instance), self.status, self.headers(), MEDIA_TYPE)


def of_status(status: int, detail: str) -> ProblemError:
    """The problem that a framework's error is."""
    return ProblemError(status, HTTPStatus(status).phrase.lower().replace(" ", "-"), detail)


def of_values(problems: Iterable[str]) -> ProblemError:
    """Parameters that cannot be used, each with why."""
    listed = list(problems)
    return ProblemError(422, "parameters", "; ".join(listed), {"problems": listed})


def stopping() -> ProblemError:
    """What is asked, or not answered yet, when the daemon stops."""
    detail = "the daemon stops: ask again when it is back"
    return ProblemError(503, "stopping", detail, retry=_STOPPING_RETRY, closes=True, is_refusal=True)


def of_error(error: IndexdError) -> ProblemError:
    """What a query raised: the caller's fault, the state of things, or damage; with the hint an operator is given."""
    detail, hint = str(error.args[0]), {"hint": error.hint} if error.hint else {}
    if isinstance(error, UsageError):
        return ProblemError(422, "parameters", detail, hint)
    if isinstance(error, DisturbedError | UnsafeStoreError) or (isinstance(error, DiskError) and error.is_transient):
        return ProblemError(503, "not-now", detail, hint, retry=1)
    if isinstance(error, CorruptDataError):
        return ProblemError(500, "corrupt-data", detail, hint)
    return ProblemError(500, "internal", detail, hint)


Responses = dict[int | str, dict[str, Any]]
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_WORDS = {
    401: "A token is needed (http_token_file)",
    404: "There is no such thing",
    409: "The parameters contradict each other",
    413: "Requests have no body here",
    414: "The address is too long",
    421: "The Host header names another host",
    422: "A parameter is wrong, unknown or missing",
    431: "The headers are too long",
    500: "The index is damaged, or a defect",
    503: "Not now: it recovers, or too much is asked at once; Retry-After says when",
}
_ALWAYS = (401, 405, 413, 414, 421, 422, 431, 500, 503)
_WORDS[405] = "Everything here is only read: GET and HEAD"


def documented(model: type[BaseModel], description: str, *problems: int) -> dict[str, Any]:
    """Arguments of a route: what it answers, and which problems beside those of every route."""
    answers: Responses = {200: {"model": model, "description": description}}
    answers |= {status: {"description": _WORDS[status], "content": _PROBLEM} for status in (*_ALWAYS, *problems)}
    return {"response_model": None, "responses": answers}


def documented_text(kind: str, description: str) -> dict[str, Any]:
    """The same for an answer that is no JSON; ``kind`` is its media type."""
    found = documented(BaseModel, description)
    found["responses"][200] = {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    return found
