"""Frames of the remoting protocol, as RocketMQ's own classes write and sign them, and who may ask by them."""

from __future__ import annotations

import json
import ssl
import struct
import subprocess
from ipaddress import ip_network
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.config import load
from indexd.errors import UsageError
from indexd.serve.remoting.access import Access, Credentials, read_access
from indexd.serve.remoting.command import (
    HEADER_MAX,
    LANGUAGES,
    V4_9_3,
    V4_9_4,
    Form,
    FrameError,
    RemotingCommand,
    decode_command,
    encode_command,
    take_command,
)
from support.missing import need
from support.remoting_frames import BINARY, JSON, SIGNED, SIGNED_ACCESS_KEY, SIGNED_SECRET_KEY

if TYPE_CHECKING:
    from pathlib import Path


_QUERY = {
    "maxNum": "64",
    "beginTimestamp": "0",
    "key": "k-é😀",
    "_UNIQUE_KEY_QUERY": "false",
    "topic": "T",
    "endTimestamp": "9223372036854775807",
}
_REMARK = 'can not find "message"\n中'
_COMMANDS = {
    "query": RemotingCommand(12, 7, 0, "JAVA", ext_fields=_QUERY),
    "oneway": RemotingCommand(34, 2**31 - 1, 2, "JAVA", body=b'{"clientID":"c"}'),
    "answer": RemotingCommand(22, -1, 1, "JAVA", remark=_REMARK, ext_fields={"empty": ""}),
    "pop": RemotingCommand(200050, 1, 0, "JAVA"),
    "lone": RemotingCommand(12, 2, 0, "JAVA", ext_fields={"key": "a?b"}),  # where it was a, U+D800, b
}
_BINARY_FRAMES = [bytes.fromhex(digits)[4:] for digits in BINARY.values()]
_JSON_FRAMES = [(bytes.fromhex(heads) + text.encode())[4:] for heads, text in JSON.values()]


def _frame(header: str | bytes, body: bytes = b"", form: int = 0) -> bytes:
    data = header.encode() if isinstance(header, str) else header
    return struct.pack(">i", form << 24 | len(data)) + data + body


def _header(frame: bytes) -> dict[str, object]:
    size = int.from_bytes(frame[5:8])
    decoded: dict[str, object] = json.loads(frame[8 : 8 + size])
    return decoded


def _as_binary(name: str) -> RemotingCommand:
    command = _COMMANDS[name]
    code = 0x0D72 if name == "pop" else command.code  # the low 16 bits of 200050: RocketMQ's own loss
    return RemotingCommand(
        code, command.opaque, command.flag, "JAVA", 0, command.remark, command.ext_fields, command.body, Form.ROCKETMQ
    )


@pytest.mark.parametrize("name", _COMMANDS)
def test_what_rocketmq_writes(name: str) -> None:
    heads, text = JSON[name]
    frame = bytes.fromhex(heads) + text.encode()
    assert take_command(bytearray(frame), 1 << 20) == _COMMANDS[name]
    frame = bytes.fromhex(BINARY[name])
    assert take_command(bytearray(frame), 1 << 20) == _as_binary(name)


@pytest.mark.parametrize("name", _COMMANDS)
def test_what_we_write_is_what_rocketmq_writes(name: str) -> None:
    heads, text = JSON[name]
    theirs, ours = bytes.fromhex(heads) + text.encode(), encode_command(_COMMANDS[name])
    assert _header(ours) == {"extFields": {}, **_header(theirs)}  # without any, RocketMQ leaves out the member
    assert ours.endswith(_COMMANDS[name].body)
    assert encode_command(_as_binary(name)).hex() == BINARY[name]
    command = _as_binary(name)
    command.code = _COMMANDS[name].code
    assert encode_command(command).hex() == BINARY[name]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('{"n":5,"t":true,"f":false,"x":null,"d":1.50}', {"n": "5", "t": "true", "f": "false", "d": "1.50"}),
        ('{"o":{"a":[1, 2]},"big":123456789012345678901234567890}', {"o": '{"a":[1,2]}', "big": "1234567890" * 3}),
        ('{"a":"1","a":"2"}', {"a": "2"}),
        ('{"properties":"k\x01v\x02\\u0001\x00\t"}', {"properties": "k\x01v\x02\x01\0\t"}),
        ('{"":"","k":"\\ud800"}', {"": "", "k": "\ud800"}),
        ("null", {}),
        ("{}", {}),
    ],
)
def test_ext_fields_are_read_as_texts(fields: str, expected: dict[str, str]) -> None:
    assert decode_command(_frame(f'{{"code":12,"opaque":7,"extFields":{fields}}}')).ext_fields == expected


def test_of_two_members_the_last_counts_and_of_the_rest_little_is_needed() -> None:
    frame = _frame(' {"code":12,"opaque":7,"code":13,"language":null,"remark":null}\n', b"b")
    assert decode_command(frame) == RemotingCommand(13, 7, body=b"b")
    assert decode_command(_frame('{"code":1,"opaque":7,"language":"KLINGON"}')).language == "KLINGON"


def test_unknown_members_go_on() -> None:
    command = decode_command(_frame('{"code":1,"opaque":7,"suspended":false,"a\\"b":"ü","n":null,"deep":[1],"f":1.5}'))
    assert command.others == {"suspended": False, 'a"b': "ü", "n": None, "f": "1.5"}
    again = decode_command(encode_command(command)[4:])
    assert again == command
    assert not again.answer(0).others


@pytest.mark.parametrize(
    "header",
    [
        "", "null", "[]", "12", '"a"', "{", "{}", '{"code":1}', '{"opaque":1}', '{"code":null,"opaque":1}',
        '{"code":"1","opaque":1}', '{"code":true,"opaque":1}', '{"code":1.0,"opaque":1}', '{"code":1,"opaque":1e3}',
        '{"code":NaN,"opaque":1}', '{"code":1,"opaque":1,"extFields":{"a":NaN}}', '{"code":2147483648,"opaque":1}',
        '{"code":1,"opaque":-2147483649}', '{"code":1,"opaque":1,"flag":99999999999}', '{"code":1,"opaque":1} x',
        '{"code":1,"opaque":1,"version":"5"}', '{"code":1,"opaque":1,"remark":5}', '{"code":1,"opaque":1,"language":3}',
        '{"code":1,"opaque":1,"extFields":[]}', '{"code":1,"opaque":1,"extFields":"a"}', '{code:1,opaque:1}',
        '{"code":1,"opaque":' + "9" * 5000 + "}", "[" * 100_000, '{"code":1,"opaque":1,"a":' + '{"a":' * 100_000,
        '{"code":1,"opaque":1,"extFields":{"a":' + "[" * 900 + "]" * 900 + "}",
        b'{"code":1,"opaque":1,"remark":"\xff"}', b"\xef\xbb\xbf{}",
    ],
    ids=lambda header: repr(header[:40]),
)  # fmt: skip
def test_json_that_is_no_header(header: str | bytes) -> None:
    with pytest.raises(FrameError) as error:
        decode_command(_frame(header))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("at", "size"), [(13, -1), (13, 2**31 - 1), (17, 2**31 - 1), (17, 200), (17, 10), (21, -1), (21, 32767), (29, -5)]
)
def test_a_binary_header_that_lies_about_a_size(at: int, size: int) -> None:
    header = bytearray(_BINARY_FRAMES[0][4:])
    length = 2 if at == 21 else 4
    header[at : at + length] = size.to_bytes(length, "big", signed=True)
    with pytest.raises(FrameError):
        decode_command(_frame(bytes(header), form=1))


def test_a_binary_header_is_read_as_java_reads_it() -> None:
    assert not decode_command(_frame(struct.pack(">hbhiiii", 1, 0, 0, 1, 0, 0, -9), form=1)).ext_fields
    assert decode_command(_frame(struct.pack(">hbhiiii", 1, 99, 0, 1, 0, 0, 0), form=1)).language == "OTHER"
    assert decode_command(_frame(struct.pack(">hbhiiii", -1, -1, 0, 1, 0, 0, 0), form=1)).code == -1
    remark = struct.pack(">hbhiii", 1, 0, 0, 1, 0, 4) + b"\xed\xa0\x80a" + struct.pack(">i", 0)
    assert decode_command(_frame(remark, form=1)).remark == "�a"  # three bytes, one U+FFFD


@pytest.mark.parametrize("form", [2, 127, -1])
def test_a_form_that_nobody_knows(form: int) -> None:
    with pytest.raises(FrameError, match="form"):
        decode_command(_frame(b"{}", form=form))


def test_headers_have_a_bound() -> None:
    empty = '{"code":1,"opaque":1,"remark":""}'
    most = empty.replace('""', '"' + "r" * (HEADER_MAX - len(empty)) + '"')
    assert len(decode_command(_frame(most, b"b" * 9)).body) == 9
    with pytest.raises(FrameError, match="header"):
        decode_command(_frame(most + " "))


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 3, 1025, 2**31 - 1])
def test_a_length_that_is_none(size: int) -> None:
    with pytest.raises(FrameError, match=str(size)):
        take_command(bytearray(struct.pack(">i", size)), 1024)


def test_a_length_says_who_speaks_something_else() -> None:
    for start, what in ((b"\x16\x03\x01\x02", "TLS"), (b"GET /", "HTTP"), (b"POST", "HTTP")):
        with pytest.raises(FrameError, match=what):
            take_command(bytearray(start), 1 << 24)


def test_texts_that_are_no_unicode_are_written_all_the_same() -> None:
    command = RemotingCommand(1, 1, 0, "OTHER", 0, "\ud83d", {"\udc00": "a\ud800b"}, others={"x": "\ud800"})
    assert decode_command(encode_command(command)[4:]) == command
    command.form = Form.ROCKETMQ
    binary = decode_command(encode_command(command)[4:])
    assert (binary.remark, binary.ext_fields) == ("?", {"?": "a?b"})


@pytest.mark.parametrize(
    "command",
    [
        RemotingCommand(1, 1, ext_fields={"n" * 32_768: ""}, form=Form.ROCKETMQ),
        RemotingCommand(1, 1, remark="r" * 2**24, form=Form.ROCKETMQ),
        RemotingCommand(1, 1, remark="r" * 2**24),
    ],
    ids=["name", "binary", "json"],
)
def test_what_cannot_be_written(command: RemotingCommand) -> None:
    with pytest.raises(FrameError):
        encode_command(command)


_INT = st.integers(-(2**31), 2**31 - 1)
_SHORT = st.integers(-(2**15), 2**15 - 1)


@given(
    st.builds(
        RemotingCommand, _SHORT, _INT, _INT, st.sampled_from(LANGUAGES), _SHORT, st.none() | st.text(min_size=1),
        st.dictionaries(st.text(), st.text()), st.binary(), st.sampled_from(Form),
    )
)  # fmt: skip
def test_what_is_written_is_read_again(command: RemotingCommand) -> None:
    frame = encode_command(command)
    buffer = bytearray(frame + frame)
    assert take_command(buffer, len(frame) - 4) == command
    del buffer[-1:]
    assert take_command(buffer, len(frame) - 4) is None
    assert buffer == frame[:-1]


@given(st.one_of(st.binary(), st.builds(_frame, st.binary(), st.binary(), st.sampled_from((0, 1)))))
@example(b"")
def test_any_bytes_are_a_command_or_a_frame_error(frame: bytes) -> None:
    _decode_any(frame)


@given(st.sampled_from(_JSON_FRAMES + _BINARY_FRAMES), st.lists(st.tuples(st.integers(0, 160), st.binary(max_size=4))))
def test_a_frame_in_which_anything_was_changed(frame: bytes, changes: list[tuple[int, bytes]]) -> None:
    buffer = bytearray(frame)
    for at, change in changes:
        buffer[at : at + len(change)] = change
    _decode_any(bytes(buffer))


def _decode_any(frame: bytes) -> None:
    try:
        command = decode_command(frame)
    except FrameError:
        return
    assert decode_command(encode_command(command)[4:]) == command


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
