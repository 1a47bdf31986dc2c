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
ALLOWED = "GET, HEAD"
_INSTANCE_MAX = 200
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
        headers = {} if self.retry is None else {"retry-after": str(self.retry)}
        if self.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ALLOWED
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = 'Bearer realm="indexd"'
        if self.closes:
            headers["connection"] = "close"
        return Response(json.dumps(row | self.members), self.status, headers, MEDIA_TYPE)


def wrong_values(problems: list[str]) -> ProblemError:
    """Parameters that cannot be used, each with why."""
    return ProblemError(422, "parameters", "; ".join(problems), {"problems": problems})


def problem_of(error: Exception) -> ProblemError | None:
    """What an error means for whoever asked; None for a defect."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, NotAnsweredError):
        return _of_no_answer(error)
    if not isinstance(error, IndexdError):
        return None
    detail, hint = str(error.args[0]), {"hint": error.hint} if error.hint else {}
    if isinstance(error, UsageError):
        return ProblemError(422, "parameters", detail, hint)
    if isinstance(error, DisturbedError | UnsafeStoreError) or (isinstance(error, DiskError) and error.is_transient):
        return ProblemError(503, "not-now", detail, hint, retry=1)
    return ProblemError(500, "corrupt-data" if isinstance(error, CorruptDataError) else "internal", detail, hint)


def _of_no_answer(error: NotAnsweredError) -> ProblemError:
    detail = str(error)
    if isinstance(error, NotOpenError):
        members = {"phase": error.phase, "recovering": error.recovering} if error.hint is None else {"hint": error.hint}
        return ProblemError(503, "not-open-yet", detail, members, retry=5)
    if isinstance(error, CrowdedError):
        return ProblemError(503, "busy", detail, retry=1)
    if isinstance(error, StoppingError):
        return ProblemError(503, "stopping", detail, retry=5, closes=True)
    return ProblemError(503, "too-long", detail, _NARROWER, retry=1)
