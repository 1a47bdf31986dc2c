"""What decides who may ask, as every outlet reads it: secret and certificate files, and who an address reaches."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from indexd.config import OFF, Config, split_address
from indexd.errors import DiskError, UsageError
from indexd.storage.disk import Disk

_SECRET_BYTES_MAX = 4096
_NO_PLAIN_FILE = (errno.EISDIR, errno.EINVAL)


def read_secret(path: Path, key: str, *, what: str, least: int, remedy: str) -> bytes:
    """The one line of printable ASCII that the file holds, which ``key`` of the configuration names.

    UsageError if it cannot be read or is none of ``least`` to 4,096 bytes; it never shows what is there instead.
    """
    try:
        secret = Disk().read(path).strip()
    except DiskError as error:
        hint = f"give a file with the {what}" if error.errno in _NO_PLAIN_FILE else error.hint
        raise UsageError(f"{error.args[0]} ({key})", hint) from error
    if not least <= len(secret) <= _SECRET_BYTES_MAX or not all(0x21 <= byte <= 0x7E for byte in secret):
        bounds = f"{least} to {_SECRET_BYTES_MAX} printable characters without spaces"
        raise UsageError(f"{path} ({key}) holds no {what}: {bounds}", remedy)
    return secret


def read_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 or later with this chain and key; UsageError if they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "give a PEM chain, and the key that belongs to it, without a password"
        raise UsageError(f"cannot use {cert} and {key} for TLS: {reason}", hint) from error
    return context


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Of names, localhost alone does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class HttpAccess:
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
        try:
            name = (urlsplit("//" + host.decode("latin-1")).hostname or "").rstrip(".")
            return name == "localhost" or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
        except ValueError:  # no address, or a bracket that is not closed
            return False


def read_http_access(config: Config) -> HttpAccess:
    """UsageError if token or certificate cannot be used."""
    http = config.http
    token = None if http.http_token_file is None else read_token(http.http_token_file)
    tls = None
    if http.http_tls_cert is not None and http.http_tls_key is not None:
        tls = read_tls(http.http_tls_cert, http.http_tls_key)
    is_near = http.http != OFF and is_loopback(split_address(http.http)[0])
    is_open = http.http != OFF and not is_near and (token is None or tls is None)
    return HttpAccess(token, tls, token is None and is_near, is_open)


def read_token(path: Path) -> bytes:
    """The token that the file holds, printable ASCII; UsageError, which never shows what is there instead."""
    remedy = f"make one: openssl rand -hex 32 > {path}"
    return read_secret(path, "http_token_file", what="token", least=8, remedy=remedy)
