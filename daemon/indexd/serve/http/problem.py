"""ProblemError: every answer that is none, as application/problem+json (RFC 9457), from whatever went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError, UsageError
from indexd.serve.queries import CrowdedError, NotAnsweredError, NotOpenError, StoppingError

MEDIA_TYPE = "application/problem+json"
_INSTANCE_MAX = 200
#: Headers that a status asks for.
_HEADERS = {
    HTTPStatus.METHOD_NOT_ALLOWED: {"allow": "GET, HEAD"},
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": 'Bearer realm="indexd"'},
}
_NARROWER = {"hint": "ask for fewer messages (max), a shorter time (begin, end), or without bodies"}


class ProblemError(Exception):
    """An answer that is none. ``slug`` ends its type, ``members`` go into its object, ``retry`` is in seconds.

    ``closes``: the connection is not kept, so that those who are refused hold none.
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
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.detail, self.retry = status, slug, detail, retry
        self.members, self.closes = dict(members or {}), closes

    def response(self, instance: str) -> Response:
        """The whole answer; ``instance`` is the path that was asked for, of which the beginning is enough."""
        row = {
            "type": f"urn:rocketmq-indexd:problem:{self.slug}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "instance": instance[:_INSTANCE_MAX],
        }
        headers = dict(_HEADERS.get(HTTPStatus(self.status), {}))
        if self.retry is not None:
            headers["retry-after"] = str(self.retry)
        if self.closes:
            headers["connection"] = "close"
        return Response(json.dumps(row | self.members), self.status, headers, MEDIA_TYPE)


def wrong_values(problems: list[str]) -> ProblemError:
    """Parameters that cannot be used, each with why."""
    return ProblemError(422, "parameters", "; ".join(problems), {"problems": problems})


def problem_of(error: Exception) -> ProblemError:
    """What an error means for whoever asked; of a defect the log says more."""
    detail = str(error.args[0]) if error.args else str(error)
    hint = {"hint": error.hint} if getattr(error, "hint", None) else {}  # type: ignore[attr-defined]  # it has one
    match error:
        case ProblemError():
            return error
        case NotOpenError():
            members = hint or {"phase": error.phase, "recovering": error.recovering}
            return ProblemError(503, "not-open-yet", detail, members, retry=5)
        case CrowdedError():
            return ProblemError(503, "busy", detail, retry=1)
        case StoppingError():
            return ProblemError(503, "stopping", detail, retry=5, closes=True)
        case NotAnsweredError():
            return ProblemError(503, "too-long", detail, _NARROWER, retry=1)
        case UsageError():
            return ProblemError(422, "parameters", detail, {**hint, "problems": [detail]})
        case DisturbedError() | UnsafeStoreError():
            return ProblemError(503, "not-now", detail, hint, retry=1)
        case DiskError() if error.is_transient:
            return ProblemError(503, "not-now", detail, hint, retry=1)
        case IndexdError():
            slug = "corrupt-data" if isinstance(error, CorruptDataError) else "internal"
            return ProblemError(500, slug, detail, hint)
    return ProblemError(500, "internal", "a defect: the daemon's log says more", closes=True)
