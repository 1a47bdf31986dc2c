"""Access: who may ask: the token, the certificate, the origins and the names under which this server is known."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from indexd.config import OFF, Config, split_address
from indexd.serve.access_files import is_loopback, read_secret, read_tls

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
    origins: frozenset[bytes]
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
        name = (
            host.decode("latin-1").rpartition(":")[0] if host.rpartition(b":")[2].isdigit() else host.decode("latin-1")
        )
        name = name.strip("[]").rstrip(".").lower()
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
    origins = frozenset(origin.encode() for origin in http.http_cors_origins)
    is_near = http.http != OFF and is_loopback(split_address(http.http)[0])
    is_open = http.http != OFF and not is_near and (token is None or tls is None)
    return Access(token, tls, origins, token is None and is_near, is_open)


def read_token(path: Path) -> bytes:
    """The token that the file holds, printable ASCII; UsageError, which never shows what is there instead."""
    remedy = f"make one: openssl rand -hex 32 > {path}"
    return read_secret(path, "http_token_file", what="token", least=_TOKEN_BYTES_MIN, remedy=remedy)
