"""A certificate of a test's own, for 127.0.0.1 and ::1, and a client that trusts it."""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

from support.missing import need

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"
_WORDS = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1 -addext {_NAMES}"


def make_certificate(home: Path) -> tuple[Path, Path]:
    """Certificate and key, PEM, in ``home``."""
    cert, key = home / "cert.pem", home / "key.pem"
    subprocess.run(
        [need("openssl"), *_WORDS.split(), "-out", str(cert), "-keyout", str(key)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


def client_context(cert: Path) -> ssl.SSLContext:
    """Trusts this certificate alone."""
    return ssl.create_default_context(cafile=cert)


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's, with both."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context
