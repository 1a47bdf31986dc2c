"""Frames of the remoting protocol as RocketMQ's own classes write and sign them, and who may ask by them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from ipaddress import ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.serve.remoting.access import Credentials, RemotingAccess
from indexd.serve.remoting.command import (
    HEADER_MAX,
    LANGUAGES,
    V4_9_3,
    Form,
    FrameError,
    RemotingCommand,
    decode_command,
    encode_command,
    take_command,
)

#: By name: the heads in hexadecimal digits, then the header and the body as a text.
JSON = {
    "query": (
        "000000f1000000ed",
        '{"code":12,"extFields":{"maxNum":"64","beginTimestamp":"0","key":"k-é😀","_UNIQUE_KEY_QUERY":"false",'
        '"topic":"T","endTimestamp":"9223372036854775807"},"flag":0,"language":"JAVA","opaque":7,'
        '"serializeTypeCurrentRPC":"JSON","version":0}',
    ),
    "oneway": (
        "0000007b00000067",
        '{"code":34,"flag":2,"language":"JAVA","opaque":2147483647,"serializeTypeCurrentRPC":"JSON","version":0}'
        '{"clientID":"c"}',
    ),
    "answer": (
        "000000a5000000a1",
        '{"code":22,"extFields":{"empty":""},"flag":1,"language":"JAVA","opaque":-1,"remark":"can not find '
        '\\"message\\"\\n中","serializeTypeCurrentRPC":"JSON","version":0}',
    ),
    "pop": (
        "0000006600000062",
        '{"code":200050,"flag":0,"language":"JAVA","opaque":1,"serializeTypeCurrentRPC":"JSON","version":0}',
    ),
    "lone": (
        "0000007c00000078",
        '{"code":12,"extFields":{"key":"a?b"},"flag":0,"language":"JAVA","opaque":2,'
        '"serializeTypeCurrentRPC":"JSON","version":0}',
    ),
}


#: The same ones with a binary header, in hexadecimal digits.
BINARY = {
    "query": (
        "0000009a01000096000c0000000000000700000000000000000000008100066d61784e756d000000023634000e626567696e"
        "54696d657374616d70000000013000036b6579000000086b2dc3a9f09f988000115f554e495155455f4b45595f5155455259"
        "0000000566616c73650005746f7069630000000154000c656e6454696d657374616d70000000133932323333373230333638"
        "3534373735383037"
    ),
    "oneway": ("000000290100001500220000007fffffff0000000200000000000000007b22636c69656e744944223a2263227d"),
    "answer": (
        "0000003e0100003a0016000000ffffffff000000010000001a63616e206e6f742066696e6420226d657373616765220ae4b8"
        "ad0000000b0005656d70747900000000"
    ),
    "pop": ("00000019010000150d7200000000000001000000000000000000000000"),
    "lone": ("0000002501000021000c0000000000000200000000000000000000000c00036b657900000003613f62"),
}


#: What AclClientRPCHook made of requests, with a binary header, in hexadecimal digits.
#:
#: ``query`` and ``token`` lack ``_UNIQUE_KEY_QUERY``, the latter has a SecurityToken; ``order``'s names are in another
#: order by UTF-16 than by code point; ``query_4_9_3`` has got ``_UNIQUE_KEY_QUERY`` after it was signed.
SIGNED = {
    "query": (
        "000000c9010000c5000c000000000000090000000000000000000000b000066d61784e756d000000023634000e626567696e"
        "54696d657374616d70000000013000094163636573734b657900000009726f636b65746d713200036b6579000000086b2dc3"
        "a9f09f98800005746f70696300000009546f70696354657374000c656e6454696d657374616d700000001339323233333732"
        "30333638353437373538303700095369676e61747572650000001c34516454746e78352b4830335457425142456c7a4f4132"
        "6b4f5a513d"
    ),
    "token": (
        "000000df010000db000c000000000000090000000000000000000000c600066d61784e756d000000023634000e626567696e"
        "54696d657374616d70000000013000094163636573734b657900000009726f636b65746d713200036b6579000000086b2dc3"
        "a9f09f9880000d5365637572697479546f6b656e00000003746f6b0005746f70696300000009546f70696354657374000c65"
        "6e6454696d657374616d70000000133932323333373230333638353437373538303700095369676e61747572650000001c63"
        "6e5756744a6a695a624a6b46624e4155692f35665252793453673d"
    ),
    "beat": (
        "0000006c0100005800220000000000000a00000000000000000000004300094163636573734b657900000009726f636b6574"
        "6d713200095369676e61747572650000001c6b32485a576155664b4466374d38373852554555514e396a366b453d7b22636c"
        "69656e744944223a2263227d"
    ),
    "no_fields": (
        "0000005c0100005800230000000000000b00000000000000000000004300094163636573734b657900000009726f636b6574"
        "6d713200095369676e61747572650000001c4f7531543538524963795a57615449777a6b684a5a576e2f5a76733d"
    ),
    "order": (
        "000000880100008400230000000000000c00000000000000000000006f00046c6f6e6500000003613f620009416363657373"
        "4b657900000009726f636b65746d71320003efbd9e00000001320004f09f9880000000013100047a65726f00000000000953"
        "69676e61747572650000001c396a4f57466a5235767441332f42722b7931364e2b37565a644e493d"
    ),
    "query_5_4_0": (
        "000000e4010000e0000c0001ed000000090000000000000000000000cb00066d61784e756d000000023634000e626567696e"
        "54696d657374616d70000000013000094163636573734b657900000009726f636b65746d713200036b6579000000086b2dc3"
        "a9f09f988000115f554e495155455f4b45595f515545525900000004747275650005746f70696300000009546f7069635465"
        "7374000c656e6454696d657374616d70000000133932323333373230333638353437373538303700095369676e6174757265"
        "0000001c2b4639533251613579496d476d63782b6a577374654645476b6f593d"
    ),
    "query_4_9_8": (
        "000000e4010000e0000c000199000000090000000000000000000000cb00115f554e495155455f4b45595f51554552590000"
        "000474727565000e626567696e54696d657374616d70000000013000095369676e61747572650000001c2b46395332516135"
        "79496d476d63782b6a577374654645476b6f593d0005746f70696300000009546f7069635465737400094163636573734b65"
        "7900000009726f636b65746d713200066d61784e756d000000023634000c656e6454696d657374616d700000001339323233"
        "33373230333638353437373538303700036b6579000000086b2dc3a9f09f9880"
    ),
    "query_4_9_3": (
        "000000e4010000e0000c00018f000000090000000000000000000000cb00115f554e495155455f4b45595f51554552590000"
        "000474727565000e626567696e54696d657374616d70000000013000095369676e61747572650000001c34516454746e7835"
        "2b4830335457425142456c7a4f41326b4f5a513d0005746f70696300000009546f7069635465737400094163636573734b65"
        "7900000009726f636b65746d713200066d61784e756d000000023634000c656e6454696d657374616d700000001339323233"
        "33373230333638353437373538303700036b6579000000086b2dc3a9f09f9880"
    ),
    "beat_4_9_8": (
        "0000006c0100005800220001990000000a00000000000000000000004300095369676e61747572650000001c6b32485a5761"
        "55664b4466374d38373852554555514e396a366b453d00094163636573734b657900000009726f636b65746d71327b22636c"
        "69656e744944223a2263227d"
    ),
}


SIGNED_ACCESS_KEY = "rocketmq2"


SIGNED_SECRET_KEY = b"12345678"


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


_FRAMES = [(bytes.fromhex(heads) + text.encode())[4:] for heads, text in JSON.values()] + _BINARY_FRAMES


def _frame(header: str | bytes, body: bytes = b"", form: int = 0) -> bytes:
    data = header.encode() if isinstance(header, str) else header
    return struct.pack(">i", form << 24 | len(data)) + data + body


def _header(frame: bytes) -> dict[str, object]:
    size = int.from_bytes(frame[5:8])
    decoded: dict[str, object] = json.loads(frame[8 : 8 + size])
    return decoded


@pytest.mark.parametrize("name", _COMMANDS)
def test_what_rocketmq_writes_is_read_and_written(name: str) -> None:
    heads, text = JSON[name]
    theirs, command = bytes.fromhex(heads) + text.encode(), _COMMANDS[name]
    assert take_command(bytearray(theirs), 1 << 20) == command
    ours = encode_command(command)
    assert _header(ours) == {"extFields": {}, **_header(theirs)}  # without any, RocketMQ leaves out the member
    assert ours.endswith(command.body)
    binary = replace(command, form=Form.ROCKETMQ)
    assert encode_command(binary).hex() == BINARY[name]
    binary.code = (command.code & 0xFFFF ^ 0x8000) - 0x8000  # of 200050 the low 16 bits: RocketMQ's own loss
    assert take_command(bytearray.fromhex(BINARY[name]), 1 << 20) == binary


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
    assert decode_command(_frame('{"code":1,"opaque":7,"language":"KLINGON","suspended":false}')).language == "KLINGON"


@pytest.mark.parametrize(
    "header",
    [
        "", "null", "[]", "12", '"a"', "{", "{}", '{"code":1}', '{"opaque":1}', '{"code":null,"opaque":1}',
        '{"code":"1","opaque":1}', '{"code":true,"opaque":1}', '{"code":1.0,"opaque":1}', '{"code":1,"opaque":1e3}',
        '{"code":NaN,"opaque":1}', '{"code":2147483648,"opaque":1}',
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


def test_headers_have_a_bound_and_one_of_two_forms() -> None:
    empty = '{"code":1,"opaque":1,"remark":""}'
    most = empty.replace('""', '"' + "r" * (HEADER_MAX - len(empty)) + '"')
    assert len(decode_command(_frame(most, b"b" * 9)).body) == 9
    for header, form in ((most + " ", 0), ("{}", 2), ("{}", 127), ("{}", -1)):
        with pytest.raises(FrameError, match="header of"):
            decode_command(_frame(header, form=form))


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 3, 1025, 2**31 - 1])
def test_a_length_that_is_none(size: int) -> None:
    with pytest.raises(FrameError, match=str(size)):
        take_command(bytearray(struct.pack(">i", size)), 1024)


def test_texts_that_are_no_unicode_are_written_all_the_same() -> None:
    command = RemotingCommand(1, 1, 0, "OTHER", 0, "\ud83d", {"\udc00": "a\ud800b"})
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


@given(
    st.binary() | st.builds(_frame, st.binary(), st.binary(), st.sampled_from((0, 1))) | st.sampled_from(_FRAMES),
    st.lists(st.tuples(st.integers(0, 160), st.binary(max_size=4))),
)
@example(b"", [])
def test_any_bytes_are_a_command_or_a_frame_error(frame: bytes, changes: list[tuple[int, bytes]]) -> None:
    buffer = bytearray(frame)
    for at, change in changes:
        buffer[at : at + len(change)] = change
    try:
        command = decode_command(buffer)
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


def test_whatever_is_changed_is_refused() -> None:
    for name, value in (("key", "K"), ("maxNum", "65"), ("new", "x"), ("SecurityToken", "tok2"), ("Signature", "é")):
        command = _signed("token")
        command.ext_fields[name] = value
        assert _KEYS.refusal(command) is not None, name
    for body in (b"", b'{"clientID":"d"}', b'{"clientID":"c"} '):
        assert _KEYS.refusal(replace(_signed("beat"), body=body)) is not None
    for name in ("query_5_4_0", "query_4_9_8", "query_4_9_3"):  # up to 4.9.3 clients do not sign it
        command = _signed(name)
        command.ext_fields["_UNIQUE_KEY_QUERY"] = "false"
        assert (_KEYS.refusal(command) is None) == (command.version <= V4_9_3)


@pytest.mark.parametrize("missing", ["AccessKey", "Signature"])
def test_a_request_that_is_not_signed(missing: str) -> None:
    command = _signed("query")
    del command.ext_fields[missing]
    assert missing in str(_KEYS.refusal(command))
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
    assert "12345678" not in repr(RemotingAccess(None, _KEYS, ()))


@pytest.mark.parametrize(
    ("networks", "host", "expected"),
    [
        ((), "203.0.113.9", True),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), "::ffff:11.1.2.3", False),
        (("10.0.0.0/8",), "::1", False),
        (("10.0.0.0/8", "192.0.2.7/32"), "192.0.2.7", True),
        (("fe80::/10",), "fe80::1%eth0", True),
        (("2001:db8::/32",), "2001:db8::5", True),
    ],
)
def test_networks(networks: tuple[str, ...], host: str, expected: bool) -> None:
    assert RemotingAccess(None, None, tuple(ip_network(text) for text in networks)).admits(host) is expected
