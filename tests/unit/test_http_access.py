"""Who may ask: tokens, TLS, origins, names; and the headers that every answer bears."""

from __future__ import annotations

import socket
import ssl
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import pytest

from indexd.config import load
from indexd.errors import UsageError
from indexd.serve.http import server as http_server
from indexd.serve.http.guard import Access, read_access
from support.missing import need
from support.serving import Serving, answer_of

if TYPE_CHECKING:
    from pathlib import Path

_TOKEN = "s3cret-token"
_ORIGIN = "https://ops.example"
_PATHS = ("/livez", "/api/v1/status", "/metrics", "/nothing", "/api/v1/messages/by-key", "/openapi.json", "/")


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    """(data, store) without an index."""
    (tmp_path / "store/commitlog").mkdir(parents=True)
    return tmp_path / "data", tmp_path / "store"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, signed by itself."""
    root = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = ("-keyout", root / "key.pem", "-out", root / "cert.pem")
    subprocess.run([need("openssl"), *words.split(), *files], check=True, capture_output=True, timeout=60)
    return root / "cert.pem", root / "key.pem"


def test_every_answer_has_the_headers_that_protect_it(place: tuple[Path, Path]) -> None:
    with Serving(*place) as server:
        for path in _PATHS:
            headers = server.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert "server" not in headers
            assert not [name for name in headers if name.startswith("access-control")]


def test_a_token(place: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{_TOKEN}\n")
    with Serving(*place, http_token_file=tmp_path / "token") as server:
        for path in _PATHS:
            for given in (
                None,
                "Bearer wrong",
                f"Basic {_TOKEN}",
                f"Bearer {_TOKEN}x",
                "Bearer",
                _TOKEN,
                "Bearer \xff",
            ):
                headers = {} if given is None else {"authorization": given.encode("latin-1")}
                answer = server.get(path, headers=headers)
                if path in ("/livez", "/"):
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == 'Bearer realm="indexd"'
                    assert answer.headers["content-type"] == "application/problem+json"
        for scheme in ("Bearer", "bearer"):
            assert server.get("/api/v1/status", headers={"authorization": f"{scheme} {_TOKEN}"}).status_code == 200
        assert _TOKEN not in repr(server.log.lines)
        schema = server.get("/openapi.json", headers={"authorization": f"Bearer {_TOKEN}"}).json()
        assert schema["security"] == [{"token": []}]


@pytest.mark.parametrize("content", ["", " \n", "two words", "short", "ü" * 20])
def test_a_token_file_that_holds_none(place: tuple[Path, Path], tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    given = {"data": str(place[0]), "store": str(place[1]), "http_token_file": str(tmp_path / "token")}
    with pytest.raises(UsageError, match="holds no token"):
        read_access(load(given, None, {}))
    (tmp_path / "token").unlink()
    with pytest.raises(UsageError, match="cannot open"):
        read_access(load(given, None, {}))


def test_tls(place: tuple[Path, Path], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=str(cert))
    with Serving(*place, http_tls_cert=cert, http_tls_key=key) as server:
        with httpx.Client(base_url=server.url, verify=trusting, trust_env=False) as client:
            assert client.get("/livez").json()["status"] == "ok"
            assert client.get("/nothing").status_code == 404
        with pytest.raises(httpx.ConnectError):
            server.get("/livez")  # it does not know who signed
        with server.connect() as plain:
            assert answer_of(plain, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 0
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(str(cert))
        old.check_hostname = False
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with old.wrap_socket(server.connect()) as peer:
            assert peer.version() == "TLSv1.2"


def test_a_handshake_that_never_comes_is_ended(
    place: tuple[Path, Path], certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 1.0)
    cert, key = certificate
    with Serving(*place, http_tls_cert=cert, http_tls_key=key, http_connections_max=4) as server:
        began = time.monotonic()
        peers = []
        for _ in range(20):
            with suppress(ConnectionError):  # some are reset before they know that they were there
                peers.append(server.connect())
        try:
            ended = [_seconds_until_closed(peer, began) for peer in reversed(peers)]
        finally:
            for peer in peers:
                peer.close()
        assert max(ended) < 10
        trusting = ssl.create_default_context(cafile=str(cert))
        deadline = time.monotonic() + 10
        while not _is_served(server.url, trusting):  # it has to see first that they have gone
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _is_served(url: str, trusting: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"{url}/livez", verify=trusting, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _seconds_until_closed(peer: socket.socket, began: float) -> float:
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("http", "has_token", "has_tls", "is_open"),
    [
        ("127.0.0.1:0", False, False, False), ("[::1]:0", False, False, False), ("localhost:0", False, False, False),
        ("off", False, False, False),
        ("0.0.0.0:0", False, False, True), ("0.0.0.0:0", True, False, True), ("0.0.0.0:0", False, True, True),
        ("0.0.0.0:0", True, True, False),
    ],
)  # fmt: skip
def test_who_listens_to_all_is_warned(
    place: tuple[Path, Path],
    certificate: tuple[Path, Path],
    tmp_path: Path,
    http: str,
    has_token: bool,
    has_tls: bool,
    is_open: bool,
) -> None:
    (tmp_path / "token").write_text(_TOKEN)
    given = {"data": str(place[0]), "store": str(place[1]), "http": http}
    if has_token:
        given["http_token_file"] = str(tmp_path / "token")
    if has_tls:
        given |= {"http_tls_cert": str(certificate[0]), "http_tls_key": str(certificate[1])}
    assert read_access(load(given, None, {})).is_open is is_open


def test_a_certificate_that_is_none(place: tuple[Path, Path], certificate: tuple[Path, Path]) -> None:
    given = {"data": str(place[0]), "store": str(place[1])}
    for cert, key in ((certificate[1], certificate[0]), (certificate[0], certificate[0]), (place[1], certificate[1])):
        with pytest.raises(UsageError, match="for TLS"):
            read_access(load(given | {"http_tls_cert": str(cert), "http_tls_key": str(key)}, None, {}))


def test_pages_of_named_origins_may_read(place: tuple[Path, Path]) -> None:
    with Serving(*place, http_cors_origins=_ORIGIN) as server:
        mine = server.get("/api/v1/status", headers={"origin": _ORIGIN}).headers
        assert mine["access-control-allow-origin"] == _ORIGIN
        other = server.get("/api/v1/status", headers={"origin": "https://evil.example"}).headers
        assert "access-control-allow-origin" not in other
        assert mine["vary"] == other["vary"] == "Origin"
        asks = {"access-control-request-method": "GET", "access-control-request-headers": "authorization"}
        preflight = server.client.options("/api/v1/status", headers={"origin": _ORIGIN, **asks})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-methods"] == "GET, HEAD"
        assert server.client.options("/livez", headers={"origin": "https://evil.example", **asks}).status_code == 400


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("127.0.0.1", True), ("127.0.0.1:9577", True), ("localhost", True), ("LOCALHOST.:9577", True),
        ("[::1]:1", True),
        ("[::1]", True), ("a.localhost:1", True), ("10.1.2.3", True), ("evil.example", False),
        ("evil.example:80", False),
        ("localhost.evil.example", False), ("127.0.0.1.evil.example:9577", False), ("", False), ("[evil]", False),
    ],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_refused(host: str, is_known: bool) -> None:
    assert Access(None, None, is_local=True).is_known_host(host.encode()) is is_known
    assert Access(None, None, is_local=False).is_known_host(host.encode())


def test_the_name_in_the_host_header(place: tuple[Path, Path], tmp_path: Path) -> None:
    with Serving(*place) as server:
        answer = server.get("/api/v1/status", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (421, "unknown-host")
        assert server.get("/api/v1/status", headers={"host": "localhost:1"}).status_code == 200
    (tmp_path / "token").write_text(_TOKEN)
    with Serving(*place, http_token_file=tmp_path / "token") as server:
        headers = {"host": "indexd.example", "authorization": f"Bearer {_TOKEN}"}
        assert server.get("/api/v1/status", headers=headers).status_code == 200
