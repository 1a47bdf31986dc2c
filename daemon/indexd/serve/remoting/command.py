"""RemotingCommand: one frame of the protocol, in both forms of its header.

::

    i32 size       of what follows, this field not counted
    u8  form       how the header is written: 0 JSON, 1 binary
    u24 size       of the header
    header         code, language, version, opaque, flag, remark, named texts (ext fields)
    body           the rest

The binary header: i16 code, i8 language, i16 version, i32 opaque, i32 flag, i32 size and remark, i32 size of what
follows, then for each ext field i16 size and name, i32 size and value. A frame is answered in its own form.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from json.encoder import encode_basestring_ascii as quote
from typing import Any, TypeVar

from indexd.commitlog.decoder import decode_utf8


class RequestCode(IntEnum):
    """What is asked and answered here, by RocketMQ 5.4.0's names; others are passed on, or are not supported."""

    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    QUERY_TOPIC_CONSUME_BY_WHO = 300


#: Names of all requests that are counted by theirs: a client could make any number of codes.
REQUEST_NAMES: dict[int, str] = {
    **{int(code): code.name for code in RequestCode},
    10: "SEND_MESSAGE", 36: "CONSUMER_SEND_MSG_BACK", 37: "END_TRANSACTION", 38: "GET_CONSUMER_LIST_BY_GROUP",
    39: "CHECK_TRANSACTION_STATE", 40: "NOTIFY_CONSUMER_IDS_CHANGED", 310: "SEND_MESSAGE_V2",
    320: "SEND_BATCH_MESSAGE", 361: "LITE_PULL_MESSAGE", 200050: "POP_MESSAGE", 200054: "NOTIFICATION",
}  # fmt: skip


class ResponseCode(IntEnum):
    """What is answered: what RocketMQ's clients act upon."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22


#: Bits of ``flag``: an answer; a request that gets none.
RESPONSE_FLAG = 1
ONEWAY_FLAG = 2

#: Languages by their number in a binary header; in a JSON header they stand by name.
LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip
OUR_LANGUAGE = "PYTHON"
UNKNOWN_LANGUAGE = "OTHER"

#: Versions are positions in RocketMQ's own list of its releases.
V4_9_3 = 399
V4_9_4 = 401
V5_4_0 = 493
#: What our answers say: the release whose answers they are.
VERSION = V5_4_0

#: What a name server serves (5.4.0): key-value settings, registration of brokers, routes, lists of topics, settings.
NAME_SERVER_CODES = frozenset(
    (100, 101, 102, 103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 311, 312, 313, 318, 319, 322, 327, 901, 904)
)

T = TypeVar("T")
LENGTH_SIZE = 4
#: The largest header: properties of 32 KiB, the most that a message has, with every character escaped, fit in.
HEADER_MAX = 2**18

_WORD = struct.Struct(">i")
_FIXED, _FIXED_LOW = struct.Struct(">hbhii"), struct.Struct(">HbHii")  # code, language, version, opaque, flag
_SHORT = struct.Struct(">h")
_HEADS = struct.Struct(">ii")  # size of the frame; form and size of the header
_FORM_SHIFT = 24
#: Of the word before a header: its size.
HEADER_MASK = 0xFFFFFF
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_SHORT_MAX = 2**15 - 1
_KINDS = {int: "integer of 32 bits", str: "text", dict: "JSON object"}
_NUMBERS = {name: number for number, name in enumerate(LANGUAGES)}


class FrameError(Exception):
    """The bytes are no command, ``str(error)`` says why; nothing behind them can be trusted: close the connection."""


class Form(IntEnum):
    """How a header is written (RocketMQ's SerializeType)."""

    JSON = 0
    ROCKETMQ = 1


@dataclass(slots=True)
class RemotingCommand:
    """A request or an answer. ``flag``: bit 0 an answer, bit 1 one-way; ``opaque`` pairs an answer with its request."""

    code: int
    opaque: int
    flag: int = 0
    language: str = UNKNOWN_LANGUAGE
    version: int = 0
    remark: str | None = None
    ext_fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    form: Form = Form.JSON

    @property
    def is_response(self) -> bool:
        """It answers a request of its receiver, and gets no answer itself."""
        return self.flag & RESPONSE_FLAG != 0

    @property
    def is_oneway(self) -> bool:
        """A request that nobody waits for: it gets no answer."""
        return self.flag & ONEWAY_FLAG != 0

    def answer(
        self, code: int, remark: str | None = None, ext_fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """The answer to this request, in its form and with its ``opaque``."""
        fields = {} if ext_fields is None else dict(ext_fields)
        return RemotingCommand(code, self.opaque, RESPONSE_FLAG, OUR_LANGUAGE, VERSION, remark, fields, body, self.form)


# --- reading ----------------------------------------------------------------------------------------------------


def take_command(buffer: bytearray, most: int) -> RemotingCommand | None:
    """The first command of ``buffer``, which is removed from it; None while it is not whole.

    FrameError for what is none, and for a frame of more than ``most`` bytes, its length not counted.
    """
    if len(buffer) < LENGTH_SIZE:
        return None
    (size,) = _WORD.unpack_from(buffer, 0)
    if not LENGTH_SIZE <= size <= most:
        raise FrameError(f"a frame of {size} bytes: {LENGTH_SIZE} to {most} are taken")
    end = LENGTH_SIZE + size
    if end > len(buffer):
        return None
    command = decode_command(buffer[LENGTH_SIZE:end])
    del buffer[:end]
    return command


def decode_command(frame: bytes | bytearray | memoryview) -> RemotingCommand:
    """The command in the bytes behind a length field. FrameError, and no other exception, whatever they are.

    The command keeps no reference to ``frame``.
    """
    if len(frame) < LENGTH_SIZE:
        raise FrameError(f"a frame of {len(frame)} bytes")
    (word,) = _WORD.unpack_from(frame, 0)
    end = LENGTH_SIZE + (word & HEADER_MASK)
    if end > min(len(frame), LENGTH_SIZE + HEADER_MAX):
        raise FrameError(f"a header of {end - LENGTH_SIZE} bytes in a frame of {len(frame)}: {HEADER_MAX} are taken")
    header, body = bytes(frame[LENGTH_SIZE:end]), bytes(frame[end:])
    form = word >> _FORM_SHIFT
    if form == Form.JSON:
        return _decode_json(header, body)
    if form == Form.ROCKETMQ:
        return _decode_binary(header, body)
    raise FrameError(f"a header of form {form & 0xFF}: 0 and 1 are known")


# Numbers with a fraction stay as they are written: an ext field is a text, and nothing else may be one. Properties are
# full of control characters, which not every client escapes.
_dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_decode_text = json.JSONDecoder(parse_float=str, parse_constant=str, strict=False).decode


def _decode_json(header: bytes, body: bytes) -> RemotingCommand:
    try:
        members = _decode_text(header.decode())
        if type(members) is not dict:
            raise FrameError("the header is no JSON object")
        # As fastjson reads a map of texts: what is none becomes one. null is as good as nothing.
        texts = {
            name: value if type(value) is str else _dump(value)
            for name, value in _member(members, "extFields", dict, {}).items()
            if value is not None
        }
        return RemotingCommand(
            _member(members, "code", int),
            _member(members, "opaque", int),
            _member(members, "flag", int, 0),
            _member(members, "language", str, UNKNOWN_LANGUAGE),
            _member(members, "version", int, 0),
            _member(members, "remark", str, "") or None,
            texts,
            body,
        )
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is no JSON: {error}") from None


def _member(members: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    value: Any = default if members.get(name) is None else members[name]
    if type(value) is not kind or (isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX):
        raise FrameError(f"{name} is no {_KINDS[kind]}")
    return value


def _decode_binary(header: bytes, body: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag = _FIXED.unpack_from(header)
        remark, at = _take_text(header, _FIXED.size, _WORD)
        (size,) = _WORD.unpack_from(header, at)
        at, end = at + _WORD.size, at + _WORD.size + size
        if end > len(header):
            raise FrameError(f"ext fields of {size} bytes, and {len(header) - at} are left")
        fields, texts = dict[str, str](), header[:end]
        while at < end:
            name, at = _take_text(texts, at, _SHORT)
            fields[name], at = _take_text(texts, at, _WORD)
    except struct.error:
        raise FrameError(f"a binary header that ends within a field, at {len(header)} bytes") from None
    spoken = LANGUAGES[language] if 0 <= language < len(LANGUAGES) else UNKNOWN_LANGUAGE
    return RemotingCommand(code, opaque, flag, spoken, version, remark or None, fields, body, Form.ROCKETMQ)


def _take_text(header: bytes, at: int, length: struct.Struct) -> tuple[str, int]:
    # The text behind its length at ``at``, and where it ends.
    (size,) = length.unpack_from(header, at)
    begin, end = at + length.size, at + length.size + size
    if not begin <= end <= len(header):
        raise FrameError(f"a text of {size} bytes at {begin} of {len(header)}")
    return decode_utf8(header[begin:end]), end


# --- writing ----------------------------------------------------------------------------------------------------


def encode_command(command: RemotingCommand) -> bytes:
    """The whole frame, its length field too. Texts that are no Unicode (half a surrogate) are written all the same.

    A binary header keeps 16 bits of code and version, as RocketMQ's own does. FrameError if it cannot be written: a
    header of 16 MiB or more, or a binary one with a name beyond 32,767 bytes.
    """
    header = _encode_json(command) if command.form == Form.JSON else _encode_binary(command)
    size = len(header)
    if size > HEADER_MASK:
        raise FrameError(f"a header of {size} bytes")
    heads = _HEADS.pack(LENGTH_SIZE + size + len(command.body), command.form << _FORM_SHIFT | size)
    return b"".join((heads, header, command.body))


def _encode_json(command: RemotingCommand) -> bytes:
    # ASCII alone: half a surrogate that came in goes out as it came.
    fields = ",".join([f"{quote(name)}:{quote(value)}" for name, value in command.ext_fields.items()])
    remark = "" if command.remark is None else f'"remark":{quote(command.remark)},'
    return (
        f'{{"code":{command.code:d},"extFields":{{{fields}}},"flag":{command.flag:d},'
        f'"language":{quote(command.language)},"opaque":{command.opaque:d},{remark}'
        f'"serializeTypeCurrentRPC":"JSON","version":{command.version:d}}}'
    ).encode("ascii")


def _encode_binary(command: RemotingCommand) -> bytes:
    remark = utf8(command.remark or "")
    parts: list[bytes] = []
    for name, value in command.ext_fields.items():
        name_bytes, value_bytes = utf8(name), utf8(value)
        if len(name_bytes) > _SHORT_MAX:
            raise FrameError(f"the name of an ext field of {len(name_bytes)} bytes")
        parts += (_SHORT.pack(len(name_bytes)), name_bytes, _WORD.pack(len(value_bytes)), value_bytes)
    fields = b"".join(parts)
    language = _NUMBERS.get(command.language, _NUMBERS[UNKNOWN_LANGUAGE])
    fixed = _FIXED_LOW.pack(command.code & 0xFFFF, language, command.version & 0xFFFF, command.opaque, command.flag)
    return b"".join((fixed, _WORD.pack(len(remark)), remark, _WORD.pack(len(fields)), fields))


def utf8(text: str) -> bytes:
    """As Java writes it: half a surrogate becomes ?."""
    return text.encode("utf-8", "replace")
