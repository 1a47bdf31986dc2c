"""A small blocking client of RocketMQ's remoting protocol, for tests of the outlet.

>>> with RemotingClient("127.0.0.1:10976", form="rocketmq") as client:
...     answer = client.ask(12, {"topic": "TopicTest", "key": "k", "maxNum": "32", ...})
...     answer.code, answer.ext_fields, answer.body

``form``: "json" or "rocketmq", how headers are written. ``tls``: an ssl.SSLContext. ``credentials``: (access key,
secret key); each request is signed with them as AclClientRPCHook does.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from indexd.serve.remoting.command import Form, RemotingCommand, decode_command, encode_command

_SECONDS = 10.0
_FORMS = {form.name.lower(): form for form in Form}
#: Ordinals in MQVersion: JSON bodies are standard from the second one on.
V5_4_0, V4_9_4, V4_9_3 = 493, 401, 399


@dataclass(frozen=True)
class Command:
    """A request or an answer; ``flag``: 1 is an answer, 2 wants none; ``header``: all members of a JSON header."""

    code: int
    opaque: int = 0
    flag: int = 0
    language: str = "JAVA"
    version: int = V5_4_0
    remark: str | None = None
    ext_fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    form: str = "json"

    @property
    def is_answer(self) -> bool:
        """Flag bit 0."""
        return bool(self.flag & 1)

    @property
    def is_oneway(self) -> bool:
        """Flag bit 1."""
        return bool(self.flag & 2)

    def json(self) -> Any:
        """The body as strict JSON."""
        return json.loads(self.body)


def encode(command: Command) -> bytes:
    """The frame, with its length field."""
    given = command.code, command.opaque, command.flag, command.language, command.version, command.remark
    return encode_command(RemotingCommand(*given, dict(command.ext_fields), command.body, _FORMS[command.form]))


def decode(frame: bytes) -> Command:
    """What follows the length field."""
    found = decode_command(frame)
    given = found.code, found.opaque, found.flag, found.language, found.version, found.remark
    return Command(*given, found.ext_fields, found.body, found.form.name.lower())


def read_command(stream: Any) -> Command:
    """The next one of a file-like; EOFError at the end."""
    start = stream.read(4)
    if len(start) < 4:
        raise EOFError
    (size,) = struct.unpack(">i", start)
    frame = stream.read(size)
    if len(frame) < size:
        raise EOFError
    return decode(frame)


def signed(ext_fields: Mapping[str, str], body: bytes, credentials: tuple[str, str]) -> dict[str, str]:
    """The fields with AccessKey and Signature: HmacSHA1 over the values in the order of their names, then the body."""
    access_key, secret_key = credentials
    fields = dict(ext_fields) | {"AccessKey": access_key}
    content = "".join(fields[name] for name in sorted(fields)).encode() + body
    mac = hmac.new(secret_key.encode(), content, hashlib.sha1)
    return fields | {"Signature": base64.b64encode(mac.digest()).decode()}


class RemotingClient:
    """One connection; not for several threads. Every wait ends after ``timeout`` seconds with TimeoutError."""

    def __init__(
        self,
        address: str,
        *,
        form: str = "json",
        tls: ssl.SSLContext | None = None,
        credentials: tuple[str, str] | None = None,
        timeout: float = _SECONDS,
        version: int = V5_4_0,
        language: str = "JAVA",
    ) -> None:
        host, _, port = address.rpartition(":")
        self.form, self.version, self.language = form, version, language
        self._credentials = credentials
        self._opaque = itertools.count(1)
        self.socket: socket.socket = socket.create_connection((host.strip("[]"), int(port)), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host.strip("[]"))
        self._stream = self.socket.makefile("rb")
        #: Requests that came from the other side, in order; ``reply`` answers one.
        self.requests: deque[Command] = deque()
        self._answers: dict[int, Command] = {}

    @property
    def local(self) -> str:
        """Our own address: HOST:PORT."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self._stream.close()
        with suppress(OSError):
            self.socket.close()

    def ask(self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"", **more: Any) -> Command:
        """Send a request and wait for its answer; ``more`` are members of Command."""
        return self.answer_to(self.start(code, ext_fields, body, **more))

    def start(
        self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"", **more: Any
    ) -> Command:
        """Send a request and wait for nothing; for ``answer_to``."""
        texts = {name: str(value) for name, value in (ext_fields or {}).items()}
        if self._credentials is not None:
            texts = signed(texts, body, self._credentials)
        command = Command(
            code, next(self._opaque), 0, self.language, self.version, ext_fields=texts, body=body, form=self.form
        )
        command = replace(command, **more)
        self.socket.sendall(encode(command))
        return command

    def tell(self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"") -> Command:
        """Send a one-way request."""
        return self.start(code, ext_fields, body, flag=2)

    def answer_to(self, request: Command) -> Command:
        """Wait for the answer with this request's opaque; others are kept, requests go to ``requests``."""
        while request.opaque not in self._answers:
            self._take(self.receive())
        return self._answers.pop(request.opaque)

    def next_request(self) -> Command:
        """Wait for a request from the other side."""
        while not self.requests:
            self._take(self.receive())
        return self.requests.popleft()

    def reply(self, request: Command, code: int = 0, ext_fields: Mapping[str, str] | None = None, **more: Any) -> None:
        """Answer a request from the other side."""
        answer = Command(code, request.opaque, 1, ext_fields=ext_fields or {}, form=request.form, **more)
        self.socket.sendall(encode(answer))

    def receive(self) -> Command:
        """The next command, whatever it is; EOFError when the other side has closed."""
        try:
            return read_command(self._stream)
        except ConnectionError as error:
            raise EOFError from error

    def is_closed(self) -> bool:
        """Wait until the other side closes the connection; False when it says something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _take(self, command: Command) -> None:
        if command.is_answer:
            self._answers[command.opaque] = command
        else:
            self.requests.append(command)
