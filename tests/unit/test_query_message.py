"""One message by offset and by id, and its body."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from indexd.errors import UsageError
from indexd.query import open_log
from indexd.query.message import MessageId, find_by_id, find_by_offset, parse_message_id, unpack_body
from indexd.storage.disk import Disk
from support.data_directory import SEGMENT, Store, config_of, spec

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.query.log import LogView


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- one message ---


def log_of(store: Store) -> LogView:
    return open_log(Disk(), config_of(store.data, store=store.root, segment_size=SEGMENT), None, check_crc=True)


def test_messages_by_offset_and_id(store: Store) -> None:
    v6 = replace(spec(), store_host=("2001:db8::1", 10911))
    first, second, third = store.append(spec(), v6, spec(size=20))
    log = log_of(store)
    for offset, digits in ((first, 32), (second, 56)):
        found = find_by_offset(log, offset)
        assert found.phy_offset == offset
        text = found.offset_msg_id
        assert len(text) == digits
        assert find_by_id(log, parse_message_id(text.lower())) == found
    assert "stored by [2001:db8::1]:10911" in find_by_id(log, MessageId(("127.0.0.1", 10911), second)).reason
    assert "nothing is written" in find_by_offset(log, store.writer.max_offset).reason
    assert "does not reach" in find_by_offset(log, 10**12).reason
    assert "does not reach" in find_by_offset(log, -1).reason
    path = store.root / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    content[third + 92] ^= 1
    path.write_bytes(bytes(content))
    assert "CRC" in find_by_offset(log, third).reason
    store.append(spec(size=3900))
    log.refresh()
    path.unlink()
    assert "has expired" in find_by_offset(log_of(store), first).reason
    log.close()


@pytest.mark.parametrize("text", ["", "zz" * 16, "00" * 15, "00" * 17, " " + "00" * 16, "0x" + "00" * 15])
def test_what_is_no_message_id(text: str) -> None:
    with pytest.raises(UsageError, match="no offset message id"):
        parse_message_id(text)


@pytest.mark.parametrize(
    ("sys_flag", "body", "compression", "unpacked", "shown"),
    [
        (0, b"text\n", None, False, "text\n"),
        (0, b"\xff\x00", None, False, "/wA="),
        (0, b"a\x1b[0m", None, False, "YRtbMG0="),
        (1, zlib.compress("é".encode()), "zlib", True, "é"),
        (0x301, zlib.compress(b"x"), "zlib", True, "x"),
        (1, b"not zlib", "zlib", False, "not zlib"),
        (1, zlib.compress(bytes(100_000), 9)[:-8], "zlib", False, None),
        (0x101, b"lz4", "lz4", False, "lz4"),
        (0x201, b"zstd", "zstd", False, "zstd"),
        (0x701, b"?", "unknown (7)", False, "?"),
    ],
)
def test_bodies(store: Store, sys_flag: int, body: bytes, compression: str, unpacked: bool, shown: str | None) -> None:
    (offset,) = store.append(replace(spec(), sys_flag=sys_flag, body=body))
    found = unpack_body(find_by_offset(log_of(store), offset))
    assert (found.compression, found.is_unpacked) == (compression, unpacked)
    if shown is not None:
        assert found.to_json()["body"] == shown


def test_a_body_that_unpacks_to_too_much_stays_as_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexd.query.message.BODY_SIZE_MAX", 1000)
    (offset,) = store.append(replace(spec(), sys_flag=1, body=zlib.compress(bytes(1001))))
    assert not unpack_body(find_by_offset(log_of(store), offset)).is_unpacked


def test_no_more_is_unpacked_than_is_wanted(store: Store) -> None:
    body = bytes(range(256)) * 4
    (offset,) = store.append(replace(spec(), sys_flag=1, body=zlib.compress(body)))
    message = find_by_offset(log_of(store), offset)
    for most in (0, 1, 1023):
        found = unpack_body(message, most)
        assert (found.data, found.is_unpacked, found.is_cut) == (body[:most], True, True)
    found = unpack_body(message, 1024)
    assert (found.data, found.is_cut) == (body, False)
