"""Guard, the middleware around all routes: who may ask, what is no request, headers, and no error unanswered.

Every answer that is none is a ProblemError: application/problem+json (RFC 9457), from whatever went wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError, UsageError
from indexd.serve.access_files import HttpAccess
from indexd.serve.queries import CrowdedError, NotAnsweredError, NotOpenError, StoppingError

MEDIA_TYPE = "application/problem+json"
_INSTANCE_MAX = 200
#: What is answered without the token: whether it is alive, and the page without figures and answers.
FREE = ("/livez", "/")
FREE_BELOW = "/static/"
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
#: Given twice, a proxy may go by the one and this server by the other.
_ONCE = frozenset({b"host", b"authorization", b"origin"})
#: Headers that a status asks for.
_HEADERS_OF = {405: {"allow": "GET, HEAD"}, 401: {"www-authenticate": 'Bearer realm="indexd"'}}
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
        headers = dict(_HEADERS_OF.get(self.status, {}))
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
        case DisturbedError() | UnsafeStoreError() | DiskError(is_transient=True):
            return ProblemError(503, "not-now", detail, hint, retry=1)
        case IndexdError():
            slug = "corrupt-data" if isinstance(error, CorruptDataError) else "internal"
            return ProblemError(500, slug, detail, hint)
    return ProblemError(500, "internal", "a defect: the daemon's log says more", closes=True)


class Guard:
    """ASGI middleware. Every request ends in an answer, and everything that is none is a problem+json."""

    def __init__(self, app: ASGIApp, access: HttpAccess, log: Any) -> None:
        self._app, self._access, self._log = app, access, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_answered = False

        async def send_guarded(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered, given = True, [*message.get("headers", ())]
                names = {name for name, _ in given}
                message["headers"] = given + [header for header in _HEADERS if header[0] not in names]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_guarded)
            return
        except asyncio.CancelledError:  # at a stop, or it would be answered in the server's own words
            self._log.warning("http_cut_off", path=scope["path"], answered=is_answered)
            error: Exception = StoppingError()
        except Exception as failed:  # noqa: BLE001 - whatever it is, it is answered, and said in the log
            error = failed
            if not isinstance(error, IndexdError | NotAnsweredError | ProblemError):
                self._log.error("http_failed", path=scope["path"], problem=repr(error), exc_info=True)
        if is_answered:
            raise error
        await problem_of(error).response(scope["path"])(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> None:
        # Raises what keeps a request from being answered; its connection is not kept: more of the kind may come.
        path, headers = scope["path"], dict(scope["headers"])
        scope.setdefault("state", {})["authorized"] = bears = self._access.bears_token(headers.get(b"authorization"))
        once = [name for name, _ in scope["headers"] if name in _ONCE]
        found: tuple[Any, ...]
        if scope["method"] not in ("GET", "HEAD"):
            found = 405, "method-not-allowed", f"{scope['method']} is not answered here, only GET and HEAD are"
        elif len(once) != len(set(once)):
            found = 400, "repeated-header", "a request has one Host, Authorization and Origin at most"
        elif headers.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in headers:
            found = 413, "content-too-large", "a request has no body here"
        elif not self._access.is_known_host(headers.get(b"host")):
            hint = {"hint": "ask by address, or set http_token_file"}
            found = 421, "unknown-host", "the Host header names neither this address nor localhost", hint
        elif not bears and path not in FREE and not path.startswith(FREE_BELOW):
            found = 401, "token-needed", "give the token: Authorization: Bearer TOKEN"
        else:
            return
        raise ProblemError(*found, closes=True)
