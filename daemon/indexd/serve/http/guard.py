"""Guard: the middleware around all routes: who may ask, limits of a request, headers, and no error unanswered."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexd.config import OFF, Config, split_address
from indexd.errors import IndexdError
from indexd.serve.access_files import is_loopback, read_secret, read_tls
from indexd.serve.http.problem import ProblemError, problem_of
from indexd.serve.queries import NotAnsweredError, StoppingError

_TOKEN_BYTES_MIN = 8
#: What is answered without the token: whether it is alive, and the page without figures and answers.
FREE = ("/livez", "/")
FREE_BELOW = "/static/"


@dataclass(frozen=True, slots=True)
class Access:
    """Read once at the start. ``is_local``: it listens to this machine alone, and needs no token.

    ``is_open``: it listens to others too, who need no token, or whose tokens and answers anybody on the way may read.
    """

    token: bytes | None
    tls: ssl.SSLContext | None
    is_local: bool
    is_open: bool = False

    def bears_token(self, authorization: bytes | None) -> bool:
        """Whether the header has the token, in a time that says nothing about it; True where none is needed."""
        if self.token is None:
            return True
        scheme, _, given = (authorization or b"").partition(b" ")
        return hmac.compare_digest(given.strip(), self.token) and scheme.lower() == b"bearer"

    def is_known_host(self, host: bytes | None) -> bool:
        """False for a name that some web page made to point to this machine (DNS rebinding): it would read along.

        Only where nothing else protects what is here. Addresses and localhost are no such names.
        """
        if not self.is_local or host is None:
            return True
        name, _, port = host.decode("latin-1").rpartition(":")
        name = (name if port.isdigit() else host.decode("latin-1")).strip("[]").rstrip(".").lower()
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def read_access(config: Config) -> Access:
    """UsageError if token or certificate cannot be used."""
    http = config.http
    token = None if http.http_token_file is None else read_token(http.http_token_file)
    tls = None
    if http.http_tls_cert is not None and http.http_tls_key is not None:
        tls = read_tls(http.http_tls_cert, http.http_tls_key)
    is_near = http.http != OFF and is_loopback(split_address(http.http)[0])
    is_open = http.http != OFF and not is_near and (token is None or tls is None)
    return Access(token, tls, token is None and is_near, is_open)


def read_token(path: Path) -> bytes:
    """The token that the file holds, printable ASCII; UsageError, which never shows what is there instead."""
    remedy = f"make one: openssl rand -hex 32 > {path}"
    return read_secret(path, "http_token_file", what="token", least=_TOKEN_BYTES_MIN, remedy=remedy)


#: Bytes of the path with its query, and of all headers together.
TARGET_MAX = 16_384
HEADERS_MAX = 16_384
_HEADERS_COUNT_MAX = 100
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
#: Given twice, a proxy may go by the one and this server by the other.
_ONCE = frozenset({b"host", b"authorization", b"origin"})


class Guard:
    """ASGI middleware. Every request ends in an answer, and everything that is none is a problem+json."""

    def __init__(self, app: ASGIApp, access: Access, log: Any) -> None:
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

        problem = self._problem(scope)
        try:
            if problem is None:
                await self._app(scope, receive, send_guarded)
        except asyncio.CancelledError:  # at a stop, or it would be answered in the server's own words
            self._log.warning("http_cut_off", path=scope["path"], answered=is_answered)
            if is_answered:
                raise
            problem = problem_of(StoppingError())
        except Exception as error:  # whatever it is, it is answered, and said in the log
            problem = problem_of(error)
            if not isinstance(error, IndexdError | NotAnsweredError | ProblemError):
                self._log.error("http_failed", path=scope["path"], problem=repr(error), exc_info=True)
            if is_answered:
                raise
        if problem is not None:
            await problem.response(scope["path"])(scope, receive, send_guarded)

    def _problem(self, scope: Scope) -> ProblemError | None:
        # What keeps a request from being answered; its connection is not kept, which may come with more of the kind.
        path, given, headers = scope["path"], scope["headers"], dict(scope["headers"])
        scope.setdefault("state", {})["authorized"] = bears = self._access.bears_token(headers.get(b"authorization"))
        once, members = [name for name, _ in given if name in _ONCE], None
        if scope["method"] not in ("GET", "HEAD"):
            found = 405, "method-not-allowed", f"{scope['method']} is not answered here, only GET and HEAD are"
        elif len(scope["query_string"]) + len(scope.get("raw_path", b"")) > TARGET_MAX:
            found = 414, "uri-too-long", f"path and query are longer than {TARGET_MAX} bytes"
        elif sum(len(name) + len(value) for name, value in given) > HEADERS_MAX or len(given) > _HEADERS_COUNT_MAX:
            detail = f"the headers are longer than {HEADERS_MAX} bytes, or more than {_HEADERS_COUNT_MAX}"
            found = 431, "headers-too-long", detail
        elif len(once) != len(set(once)):
            found = 400, "repeated-header", "a request has one Host, Authorization and Origin at most"
        elif headers.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in headers:
            found = 413, "content-too-large", "a request has no body here"
        elif not self._access.is_known_host(headers.get(b"host")):
            found = 421, "unknown-host", "the Host header names neither this address nor localhost"
            members = {"hint": "ask by address, or set http_token_file"}
        elif not bears and path not in FREE and not path.startswith(FREE_BELOW):
            found = 401, "token-needed", "give the token: Authorization: Bearer TOKEN"
        else:
            return None
        return ProblemError(*found, members, closes=True)
