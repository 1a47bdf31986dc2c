"""What decides who may ask, as every outlet reads it: secret and certificate files, and who an address reaches."""

from __future__ import annotations

import errno
import ipaddress
import ssl
from pathlib import Path

from indexd.errors import DiskError, UsageError
from indexd.storage.disk import Disk

_SECRET_BYTES_MAX = 4096
_NO_PLAIN_FILE = (errno.EISDIR, errno.EINVAL)
_TLS_HINT = "give a PEM chain and its key without a password"


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
        is_other = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        hint = "give the key that belongs to the certificate" if is_other else _TLS_HINT
        raise UsageError(f"cannot use {cert} and {key} for TLS: {reason}", hint) from error
    return context


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Of names, localhost alone does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
