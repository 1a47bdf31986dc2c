"""Client: the running daemon's own HTTP, with the token and the certificates of the configuration."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from pathlib import Path
from typing import Any

from indexd.config import Config, flag_name, split_address
from indexd.errors import UsageError
from indexd.serve.http.access import read_token

_TIMEOUT_SECONDS = 5.0
_ANSWER_BYTES_MAX = 16 << 20
_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
# What stays a text even if it is nothing but digits. All other texts of digits are numbers of 64 bits.
_TEXTS = frozenset({
    "version", "bootId", "cluster", "nodeId", "flavour", "store", "data", "name", "names", "file", "reason", "why",
    "problem", "hint", "mode", "http", "kind", "stage", "output", "topic", "key",
})  # fmt: skip


class NoAnswerError(Exception):
    """Nothing came over HTTP, or nothing of use; ``status`` is HTTP's, 0 without an answer."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Client:
    """GET from one address, with the token and the certificates of the configuration.

    UsageError if the flag names a file without a token, or one without certificates.
    """

    def __init__(self, config: Config, authorities: Path | None) -> None:
        self._token_file = config.http.http_token_file
        if config.provenance.get("http_token_file") == flag_name("http_token_file"):
            self._headers()
        trusted = authorities or config.http.http_tls_cert
        self.scheme = "http" if trusted is None else "https"
        self._context = None if trusted is None else _trusting(trusted, is_own=authorities is None)

    def get(self, address: str, path: str) -> Any:
        """The JSON of the answer, numbers of 64 bits as ints; NoAnswerError, UsageError without a token."""
        headers = self._headers()
        host, port = split_address(address)
        if self._context is None:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=self._context)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX)
        except ssl.SSLError as error:
            raise NoAnswerError(f"TLS: {error.reason or error}") from error
        except TimeoutError as error:
            raise NoAnswerError(f"no answer within {_TIMEOUT_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(self._reason(error)) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise NoAnswerError(f"{answer.status} {answer.reason}", answer.status)
        try:
            return from_text64(json.loads(body))
        except ValueError as error:
            raise NoAnswerError("what answers there is no indexd") from error

    def _reason(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or str(error)
        if self._context is None and isinstance(error, ConnectionResetError | http.client.BadStatusLine):
            return f"{reason}; if it speaks https, name its certificate with --ca"
        return reason

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            token = read_token(self._token_file)
        except UsageError as error:
            # The daemon's own hint makes a new token, over whatever file was named.
            raise UsageError(
                str(error), "name the file that holds the daemon's token with --http-token-file"
            ) from error
        return {"Authorization": f"Bearer {token.decode('ascii')}"}


def _trusting(path: Path, *, is_own: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageError(f"no certificates in {path}: {error.strerror or error}", "it must be PEM") from error
    if is_own:
        # The very certificate that this daemon shows, whatever name it has: no other one is accepted.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def from_text64(value: Any, name: str = "") -> Any:
    """``value`` with the texts of digits below it as ints, but for those that are names."""
    if isinstance(value, str):
        return int(value) if name not in _TEXTS and _NUMBER.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: from_text64(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [from_text64(item, name) for item in value]
    return value
