"""Who may ask over the remoting protocol: networks, signatures as RocketMQ's clients make them, certificates."""

from __future__ import annotations

import ssl
import subprocess
from ipaddress import ip_network
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.config import load
from indexd.errors import UsageError
from indexd.serve.remoting.access import Access, Credentials, read_access
from indexd.serve.remoting.command import V4_9_3, V4_9_4, RemotingCommand, decode_command
from support.missing import need
from support.remoting_frames import SIGNED, SIGNED_ACCESS_KEY, SIGNED_SECRET_KEY

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = Credentials(SIGNED_ACCESS_KEY, SIGNED_SECRET_KEY)


def _signed(name: str) -> RemotingCommand:
    return decode_command(bytes.fromhex(SIGNED[name])[4:])


@pytest.mark.parametrize("name", SIGNED)
def test_what_rocketmqs_clients_sign(name: str) -> None:
    command = _signed(name)
    assert _KEYS.signature(command) == command.ext_fields["Signature"]
    assert _KEYS.refusal(command) is None
    assert Access(None, _KEYS, ()).refusal(command) is None


def test_whatever_is_changed_is_refused() -> None:
    for name, value in (("key", "K"), ("maxNum", "65"), ("new", "x"), ("SecurityToken", "tok2"), ("Signature", "é")):
        command = _signed("token")
        command.ext_fields[name] = value
        assert _KEYS.refusal(command) is not None, name
    for body in (b"", b'{"clientID":"d"}', b'{"clientID":"c"} '):
        command = _signed("beat")
        command.body = body
        assert _KEYS.refusal(command) is not None
    command = _signed("query_5_4_0")
    command.ext_fields["_UNIQUE_KEY_QUERY"] = "false"
    assert _KEYS.refusal(command) is not None


def test_what_clients_up_to_4_9_3_do_not_sign() -> None:
    command = _signed("query_4_9_3")
    assert command.version == V4_9_3
    command.ext_fields["_UNIQUE_KEY_QUERY"] = "false"
    assert _KEYS.refusal(command) is None
    command.version = V4_9_4
    assert _KEYS.refusal(command) is not None


@pytest.mark.parametrize("missing", ["AccessKey", "Signature"])
def test_a_request_that_is_not_signed(missing: str) -> None:
    command = _signed("query")
    del command.ext_fields[missing]
    text = Access(None, _KEYS, ()).refusal(command)
    assert text is not None
    assert missing in text
    assert Access(None, None, ()).refusal(command) is None
    assert _KEYS.refusal(RemotingCommand(34, 1)) is not None


_TEXT = st.text(st.characters())  # half surrogates too


@given(st.dictionaries(_TEXT, _TEXT), st.binary(), st.integers(390, 410))
def test_any_fields_are_signed_and_found_signed(fields: dict[str, str], body: bytes, version: int) -> None:
    command = RemotingCommand(12, 1, version=version, ext_fields={**fields, "AccessKey": SIGNED_ACCESS_KEY}, body=body)
    command.ext_fields["Signature"] = _KEYS.signature(command)
    assert _KEYS.refusal(command) is None
    command.ext_fields["Signature"] += "="
    assert _KEYS.refusal(command) is not None


def test_a_secret_key_is_not_shown() -> None:
    assert "12345678" not in repr(Access(None, _KEYS, ()))


@pytest.mark.parametrize(
    ("networks", "host", "expected"),
    [
        ((), "203.0.113.9", True),
        ((), "no address", True),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), "::ffff:11.1.2.3", False),
        (("10.0.0.0/8",), "::1", False),
        (("10.0.0.0/8", "192.0.2.7/32"), "192.0.2.7", True),
        (("fe80::/10",), "fe80::1%eth0", True),
        (("2001:db8::/32",), "2001:db8::5", True),
        (("10.0.0.0/8",), "no address", False),
        (("0.0.0.0/0",), "", False),
    ],
)
def test_networks(networks: tuple[str, ...], host: str, expected: bool) -> None:
    assert Access(None, None, tuple(ip_network(text) for text in networks)).admits(host) is expected


# --- the configuration ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem and key.pem, and the file secret."""
    root = tmp_path_factory.mktemp("access")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    outputs = ("-keyout", root / "key.pem", "-out", root / "cert.pem")
    subprocess.run([need("openssl"), *words.split(), *outputs], check=True, capture_output=True, timeout=60)
    (root / "secret").write_bytes(SIGNED_SECRET_KEY + b"\n")
    return root


def _read(store: Path, **keys: object) -> Access:
    return read_access(load({"store": store, **keys}, None, {}))


def _tls(files: Path) -> dict[str, object]:
    return {"remoting_tls_cert": files / "cert.pem", "remoting_tls_key": files / "key.pem"}


def _acl(files: Path) -> dict[str, object]:
    return {"remoting_access_key": SIGNED_ACCESS_KEY, "remoting_secret_key_file": files / "secret"}


def test_all_of_it(tmp_path: Path, files: Path) -> None:
    access = _read(tmp_path, remoting="0.0.0.0:0", remoting_allow="10.0.0.0/8", **_tls(files), **_acl(files))
    assert isinstance(access.tls, ssl.SSLContext)
    assert access.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert access.credentials == _KEYS
    assert access.networks == (ip_network("10.0.0.0/8"),)
    assert not access.is_open


def test_who_is_let_in_by_everybodys_leave(tmp_path: Path, files: Path) -> None:
    tls, acl = _tls(files), _acl(files)
    for remoting in ("127.0.0.1:0", "localhost:0", "[::1]:0", "off"):
        assert not _read(tmp_path, remoting=remoting).is_open
    for guard in ({}, tls, acl, {"remoting_allow": "0.0.0.0/0"}, {"remoting_allow": "10.0.0.0/8,::/0"}):
        assert _read(tmp_path, remoting="0.0.0.0:0", **guard).is_open, guard
    for guard in ({**tls, **acl}, {"remoting_allow": "10.0.0.0/8"}):
        assert not _read(tmp_path, remoting="0.0.0.0:0", **guard).is_open, guard


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"x" * 4097])
def test_a_secret_key_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="remoting_secret_key_file") as error:
        _read(tmp_path, remoting_access_key="rocketmq2", remoting_secret_key_file=path)
    assert "words" not in error.value.line()


def test_what_is_wrong_with_files_is_said(tmp_path: Path, files: Path) -> None:
    with pytest.raises(UsageError, match="remoting_secret_key_file") as refused:
        _read(tmp_path, remoting_access_key="rocketmq2", remoting_secret_key_file=tmp_path)
    assert refused.value.hint == "give a file with the secret key"
    words = ("openssl", "genrsa", "-out", tmp_path / "other.pem", "2048")
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with pytest.raises(UsageError, match="TLS") as refused:
        _read(tmp_path, remoting_tls_cert=files / "cert.pem", remoting_tls_key=tmp_path / "other.pem")
    assert refused.value.hint == "give the key that belongs to the certificate"


def test_files_that_are_not_there(tmp_path: Path, files: Path) -> None:
    with pytest.raises(UsageError, match="remoting_secret_key_file"):
        _read(tmp_path, remoting_access_key="rocketmq2", remoting_secret_key_file=tmp_path / "none")
    with pytest.raises(UsageError, match="TLS"):
        _read(tmp_path, remoting_tls_cert=files / "cert.pem", remoting_tls_key=files / "secret")
