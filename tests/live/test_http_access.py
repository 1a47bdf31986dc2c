"""Clients that err, that are slow, or that mean harm: each is answered or ended; and who may ask at all."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.config import load
from indexd.errors import UsageError
from indexd.serve.access_files import HttpAccess, read_http_access, read_token
from indexd.serve.http.server import Limits
from support.serving import Serving, answer_of, client_context, make_certificate, problem, read_all, wait_for

_BY_KEY = "/api/v1/messages/by-key"
_HOST = b"host: localhost\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server over a directory without an index: a query that is understood is answered by 503."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "store/commitlog").mkdir(parents=True)
    with Serving(root / "data", root / "store") as serving:
        yield serving


@pytest.mark.parametrize(
    "query",
    [
        "", "topic=T", "key=k", "topic=&key=k", "topic=T&key=", "topic=T&key=k&kez=1", "topic=T&topic=T&key=k",
        "topic=T&key=%ff", "topic=%C3%28&key=k", "topic=T&key=k&max=0", "topic=T&key=k&max=1001",
        "topic=T&key=k&max=-1",
        "topic=T&key=k&max=1.0", "topic=T&key=k&max=1e3", "topic=T&key=k&max=%201", "topic=T&key=k&max=%2B1",
        "topic=T&key=k&max=1_0", "topic=T&key=k&max=%D9%A1", "topic=T&key=k&max=",
        "topic=T&key=k&begin=9223372036854775808", "topic=T&key=k&begin=-1", "topic=T&key=k&end=-1",
        "topic=T&key=k&end=-9223372036854775809", f"topic=T&key=k&end={'9' * 4000}", "topic=T&key=k&before=-1",
        "topic=T&key=k&mode=Exact", "topic=T&key=k&index_type=k", "topic=T&key=k&body=xml", f"topic={'T' * 256}&key=k",
        f"topic=T&key={'k' * 1025}", "topic=T&key=k" + "&a" * 40, "[]=1", "%00=1&topic=T&key=k",
    ],
)  # fmt: skip
def test_parameters_that_are_none(server: Serving, query: str) -> None:
    answer = server.get(f"{_BY_KEY}?{query}")
    assert problem(answer, 422, "parameters")["problems"]
    assert len(answer.content) < 4096


def test_times_the_wrong_way_round(server: Serving) -> None:
    for path in (f"{_BY_KEY}?topic=T&key=k&begin=2&end=1", "/api/v1/messages/by-unique-key?topic=T&id=k&begin=2&end=1"):
        answer = server.get(path)
        detail = problem(answer, 409, "parameters")["detail"]
        assert "the first store time, 2, is behind the last one, 1" in detail


@pytest.mark.parametrize(
    "query", ["topic=T&key=k", "topic=%E8%AE%A2&key=%00%0a", f"topic=T&key={'𐀀' * 1024}", "topic=T&key=a%2Bb+c"]
)
def test_parameters_that_are_understood(server: Serving, query: str) -> None:
    problem(server.get(f"{_BY_KEY}?{query}"), 503, "not-open-yet")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/messages/by-queue-offset?topic=T&queue=-1", 422),
        ("/api/v1/messages/by-queue-offset?topic=T&queue=0&offset=-1", 422),
        ("/api/v1/messages/by-time?time=-1", 422), ("/api/v1/messages/by-time?time=1&topic=T&queue=-1", 422),
        ("/api/v1/messages/by-unique-key?topic=T&id=", 422),
        ("/api/v1/messages/by-unique-key?topic=T&id=i&begin=-1", 422),
        ("/api/v1/messages/-1", 422), ("/api/v1/messages/0x10", 422), ("/api/v1/messages/", 404),
        ("/api/v1/messages", 404),
        (f"/api/v1/messages/{'9' * 20}", 422), (f"/api/v1/messages/{'A' * 31}", 422), ("/api/v1/messages/1/2", 404),
        ("/api/v1/messages/%00", 422), ("/api/v1/index-files/x", 404), ("/static/..%2f..%2f..%2fetc%2fpasswd", 404),
        ("/livez/", 404), ("//livez", 404), ("/static/../livez", 404), ("/static/..%2f..%2fserver.py", 404),
        ("/docs", 404), ("/redoc", 404), ("/%ff", 404), ("/livez?x=1", 422), ("/metrics?x", 422),
        (f"{_BY_KEY}?topic=T&key=k&mode=rocketmq&before=1", 409), ("/api/v1/messages/by-time?time=1&topic=T", 409),
    ],
)  # fmt: skip
def test_paths_that_are_none(server: Serving, path: str, status: int) -> None:
    with server.connect() as peer:
        code, data = answer_of(peer, b"GET %s HTTP/1.1\r\n%sconnection: close\r\n\r\n" % (path.encode(), _HOST))
    assert code == status
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["status"] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_methods_that_change_things(server: Serving, method: str) -> None:
    answer = server.client.request(method, "/livez")
    detail = problem(answer, 405, "method-not-allowed")["detail"]
    assert detail == f"{method} is not answered here, only GET and HEAD are"
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/", "/nothing", "/openapi.json", f"{_BY_KEY}?topic=T&key=k"])
def test_head_is_get_without_the_body(server: Serving, path: str) -> None:
    whole, head = server.get(path), server.client.head(path)
    assert head.status_code == whole.status_code
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.content == b""
    if path != "/metrics" and path != "/":  # whose figures move
        assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"content-length: 5\r\n\r\nabcde", 413),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"content-length: 99999999999\r\n\r\n", 413),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n", 413),
        (b"GET /" + b"x" * 70_000, 0),
        (b"GET /livez?" + b"x" * 70_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"x: " + b"x" * 70_000, 0),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"x: y\r\n" * 10_000, 0),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /livez HTTP/9.9\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nhost: rebound.example\r\n" + _HOST + b"\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n" + _HOST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"CONNECT example.com:443 HTTP/1.1\r\n" + _HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
def test_requests_that_are_none(server: Serving, words: bytes, status: int) -> None:
    with server.connect() as peer:
        code, data = answer_of(peer, words)
    head, _, body = data.partition(b"\r\n\r\n")
    assert code == status
    assert b"\r\nconnection: close" in head or not data
    assert len(body) < 1000
    if data and (b"host: rebound" in words or b"authorization" in words or status != 400):  # else it is no HTTP at all
        assert b"\r\ncontent-type: application/problem+json" in head
        assert json.loads(body)["status"] == status
    assert server.get("/livez").status_code == 200


@settings(max_examples=60)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(
            lambda data: b"GET /api/v1/messages/by-key?" + data + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
        ),
        st.binary(max_size=200).map(lambda data: b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + data + b"\r\n\r\n"),
    )
)
def test_any_bytes(server: Serving, words: bytes) -> None:
    with server.connect(10) as peer:
        peer.sendall(words)
        peer.shutdown(1)
        code, _ = read_all(peer)
    assert code < 500 or code == 503
    assert server.get("/livez").status_code == 200


@pytest.mark.parametrize("words", [b"", b"GET /liv", b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: y", b"\r\n\r\n"])
def test_a_request_that_does_not_end(place: tuple[Path, Path], words: bytes) -> None:
    with Serving(*place, limits=Limits(request_seconds=0.5)) as server, server.connect() as peer:
        assert answer_of(peer, words) == (0, b"")
        assert server.get("/livez").status_code == 200


@pytest.mark.parametrize(
    ("limits", "clients", "whole"), [(Limits(answer_seconds=1.0), 1, 0), (Limits(untaken_bytes=4_000_000), 6, 1)]
)
def test_answers_that_are_not_taken_are_cut_off(
    place: tuple[Path, Path], limits: Limits, clients: int, whole: int
) -> None:
    """By how long one lies there, and by how much lies there of all clients."""
    with Serving(*place, limits=limits) as server:
        for _ in range(1000):
            server.board.events.tell("rolled", {"text": "x" * 20_000})
        before = _descriptors()
        peers = [server.connect() for _ in range(clients)]
        for peer in peers:
            peer.sendall(b"GET /api/v1/events HTTP/1.1\r\n" + _HOST + b"connection: close\r\n\r\n")
        wait_for(lambda: _descriptors() >= before + 2 * clients)
        wait_for(lambda: _descriptors() <= before + clients + whole)  # it has let go of the others
        assert sum(len(read_all(peer)[1]) > 20_000_000 for peer in peers) <= whole
        for peer in peers:
            peer.close()
        assert len(server.get("/api/v1/events").content) > 20_000_000


def test_connections_beyond_the_bound_are_reset(place: tuple[Path, Path]) -> None:
    with Serving(*place, http_connections_max=16) as server:
        assert server.get("/livez").status_code == 200
        before, peers = _descriptors(), []
        with ExitStack() as stack:
            for _ in range(300):
                with suppress(ConnectionError):  # it is reset at once
                    peers.append(stack.enter_context(server.connect()))
            wait_for(lambda: _descriptors() - before <= len(peers) + 15)
            assert not _answers(peers[-1])
            assert server.get("/livez").status_code == 200  # on a connection that was there before

        def is_free() -> bool:
            with suppress(ConnectionError), server.connect() as peer:
                return _answers(peer)
            return False

        wait_for(is_free)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone


def _answers(peer: socket.socket) -> bool:
    with suppress(ConnectionError):
        return answer_of(peer, b"GET /livez HTTP/1.1\r\n" + _HOST + b"connection: close\r\n\r\n")[0] == 200
    return False


# --- who may ask

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
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("path", _PATHS)
def test_every_answer_has_the_headers_that_protect_it(server: Serving, path: str) -> None:
    headers = server.get(path).headers
    expected = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
    assert {name: headers[name] for name in expected} == expected
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not [name for name in headers if name == "server" or name.startswith("access-control")]


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
                    problem(answer, 401, "token-needed")
                    assert answer.headers["www-authenticate"] == 'Bearer realm="indexd"'
        for scheme in ("Bearer", "bearer"):
            assert server.get("/api/v1/status", headers={"authorization": f"{scheme} {_TOKEN}"}).status_code == 200
        assert _TOKEN not in repr(server.log.lines)
        schema = server.get("/openapi.json", headers={"authorization": f"Bearer {_TOKEN}"}).json()
        assert schema["security"] == [{"token": []}]


@pytest.mark.parametrize("content", ["", " \n", "two words", "short", "ü" * 20])
def test_a_token_file_that_holds_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(UsageError, match="holds no token"):
        read_token(tmp_path / "token")


def test_tls(place: tuple[Path, Path], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trusting = client_context(cert)
    with Serving(*place, http_tls_cert=cert, http_tls_key=key) as server:
        with httpx.Client(base_url=server.url, verify=trusting, trust_env=False) as client:
            assert client.get("/livez").json()["status"] == "ok"
            assert client.get("/nothing").status_code == 404
        with pytest.raises(httpx.ConnectError):
            server.get("/livez")  # it does not know who signed
        with server.connect() as plain:
            assert answer_of(plain, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 0


def test_a_handshake_that_never_comes_is_ended(place: tuple[Path, Path], certificate: tuple[Path, Path]) -> None:
    (cert, key), limits = certificate, Limits(handshake_seconds=1.0)
    tls = {"http_tls_cert": cert, "http_tls_key": key}
    with Serving(*place, limits=limits, **tls, http_connections_max=4) as server, ExitStack() as stack:
        peers = []
        for _ in range(20):
            with suppress(ConnectionError):  # some are reset before they know that they were there
                peers.append(stack.enter_context(server.connect(10)))
        for peer in peers:
            assert read_all(peer)[0] == 0  # at the latest when the handshake's time is over

        def is_served() -> bool:  # it has to see first that they have gone
            with suppress(httpx.TransportError):
                return httpx.get(f"{server.url}/livez", verify=client_context(cert), trust_env=False).is_success
            return False

        wait_for(is_served)


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
    assert read_http_access(load(given, None, {})).is_open is is_open


def test_a_certificate_that_is_none(place: tuple[Path, Path], certificate: tuple[Path, Path]) -> None:
    given = {"data": str(place[0]), "store": str(place[1])}
    for cert, key in ((certificate[1], certificate[0]), (certificate[0], certificate[0]), (place[1], certificate[1])):
        with pytest.raises(UsageError, match="for TLS"):
            read_http_access(load(given | {"http_tls_cert": str(cert), "http_tls_key": str(key)}, None, {}))


def test_pages_of_named_origins_may_read(place: tuple[Path, Path]) -> None:
    with Serving(*place, http_cors_origins=_ORIGIN) as server:
        mine = server.get("/api/v1/status", headers={"origin": _ORIGIN}).headers
        assert mine["access-control-allow-origin"] == _ORIGIN
        other = server.get("/api/v1/status", headers={"origin": "https://evil.example"}).headers
        assert "access-control-allow-origin" not in other
        assert mine["vary"] == other["vary"] == "Origin"
        asks = {"access-control-request-method": "GET", "access-control-request-headers": "authorization"}
        preflight = server.client.options("/api/v1/status", headers={"origin": _ORIGIN, **asks})
        assert (preflight.status_code, preflight.headers["access-control-allow-methods"]) == (200, "GET, HEAD")
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
    assert HttpAccess(None, None, is_local=True).is_known_host(host.encode()) is is_known
    assert HttpAccess(None, None, is_local=False).is_known_host(host.encode())


def test_the_name_in_the_host_header(server: Serving, place: tuple[Path, Path], tmp_path: Path) -> None:
    problem(server.get("/api/v1/status", headers={"host": "evil.example"}), 421, "unknown-host")
    assert server.get("/api/v1/status", headers={"host": "localhost:1"}).status_code == 200
    (tmp_path / "token").write_text(_TOKEN)
    with Serving(*place, http_token_file=tmp_path / "token") as other:
        headers = {"host": "indexd.example", "authorization": f"Bearer {_TOKEN}"}
        assert other.get("/api/v1/status", headers=headers).status_code == 200
