"""Access: who may ask: the token, the certificate, the origins and the names under which this server is known."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from indexd.config import OFF, Config, split_address
from indexd.errors import DiskError, UsageError
from indexd.storage.disk import Disk

_TOKEN_BYTES = (8, 4096)
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
        tls = _read_tls(http.http_tls_cert, http.http_tls_key)
    origins = frozenset(origin.encode() for origin in http.http_cors_origins)
    is_near = http.http != OFF and _is_loopback(split_address(http.http)[0])
    is_open = http.http != OFF and not is_near and (token is None or tls is None)
    return Access(token, tls, origins, token is None and is_near, is_open)


def read_token(path: Path) -> bytes:
    """The token that the file holds, printable ASCII; UsageError, which never shows what is there instead."""
    try:
        token = Disk().read(path).strip()
    except DiskError as error:
        raise UsageError(f"{error.args[0]} (http_token_file)", error.hint) from error
    least, most = _TOKEN_BYTES
    if not least <= len(token) <= most or not all(0x21 <= byte <= 0x7E for byte in token):
        raise UsageError(
            f"{path} (http_token_file) holds no token: {least} to {most} printable characters without spaces",
            f"make one: openssl rand -hex 32 > {path}",
        )
    return token


def _read_tls(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot use {cert} and {key} for TLS: {reason}", "give a PEM chain and its key without a password"
        ) from error
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
