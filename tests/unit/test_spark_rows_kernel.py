"""Frames to Arrow columns: for whatever bytes the decoder takes, what it says, column by column."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import DisturbedError
from indexd.spark.source import rows as located_module
from indexd.spark.source.columns import ALL_COLUMNS, SCHEMA
from indexd.spark.source.rows import Locator, host_text
from indexd.spark.source.rows_kernel import PAIRS_MAX, gather
from support.commitlog_writer import FrameSpec, encode_frame
from support.rows import plain, rows_of
from support.strategies import Sample, logs
from support.twins import batches, encode

JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
#: Those for which frames are looked at.
LOOKED_AT = [
    "bornTimestamp", "bornHost", "storeHost", "reconsumeTimes", "preparedTransactionOffset", "keys", "uniqKey", "tags",
    "properties", "msgId", "body",
]  # fmt: skip


def looked_at(
    locator: Locator, batch: DispatchBatch, data: bytes, base: int, columns: list[str]
) -> list[dict[str, Any]]:
    """Rows of these columns, their types being the schema's."""
    part = data[batch.begin_offset - base : batch.end_offset - base]
    frames, used = np.frombuffer(part, dtype=np.uint8).copy(), batch.columns
    offsets, sizes, times = (column[: batch.rows] for column in (used.phy_offset, used.size, used.store_timestamp))
    found = locator.locate(frames, batch.begin_offset, offsets, sizes, times)
    arrays = {name: found.column(name) for name in columns}
    frames[:] = 0xEE  # the buffer is used again: nothing may be kept of it
    for name, array in arrays.items():
        array.validate(full=True)
        assert array.type == SCHEMA.field(name).type
        assert SCHEMA.field(name).nullable or array.null_count == 0
    return [plain({name: array[row].as_py() for name, array in arrays.items()}) for row in range(batch.rows)]


def rows_by_kernel(data: bytes, columns: list[str], rows_max: int = 7, base: int = 0) -> list[dict[str, Any]]:
    locator = Locator(frozenset(columns))
    found: list[dict[str, Any]] = []
    for batch in batches(data, "3.x", [rows_max], base):
        found += looked_at(locator, batch, data, base, columns)
    return found


def rows_by_decoder(data: bytes, columns: list[str], base: int = 0) -> list[dict[str, Any]]:
    return [{name: row[name] for name in columns} for row in rows_of(data, base, 1 << 50)]


@given(
    logs(max_size=12 if JIT else 4), st.booleans(), st.integers(1, 9), st.sets(st.sampled_from(LOOKED_AT), min_size=1)
)
def test_every_column_is_what_the_decoder_says(
    samples: list[Sample], prop_crc: bool, rows_max: int, columns: set[str]
) -> None:
    data = encode(samples, 1 << 33, prop_crc=prop_crc)
    for asked in (LOOKED_AT, sorted(columns)):
        assert rows_by_kernel(data, asked, rows_max, 1 << 33) == rows_by_decoder(data, asked, 1 << 33)


def agreed(data: bytes) -> dict[str, Any]:
    """The one row, on which both agree."""
    (row,) = rows_by_kernel(data, LOOKED_AT)
    assert [row] == rows_by_decoder(data, LOOKED_AT)
    return row


def raw(properties: bytes) -> bytes:
    return encode_frame(FrameSpec("T"), 0, raw_properties=properties)


def test_an_empty_message() -> None:
    row = agreed(encode_frame(FrameSpec(""), 0))
    assert (row["keys"], row["uniqKey"], row["tags"], row["properties"], row["body"]) == ([], None, None, {}, b"")


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (b"A\x01b", {"A": "b"}),
        (b"A\x01\x02B\x01c\x02", {"B": "c"}),
        (b"\x01x\x02K\x01v\x01w\x02", {"K": "v\x01w"}),
        (b"KEYS\x01a\x02KEYS\x01z\x02", {"KEYS": "z"}),
        (b"AB\x02KEYS\x01q\x02", {"KEYS": "q"}),
        (b"K\x01\xed\xa0\x80\x02", {"K": "�"}),
        (b"K\x01\xed\xa0\xbd\xed\xb8\x80\x02", {"K": "��"}),
        (b"K\x01\xc0\x80\x02L\x01\xe2\x82", {"K": "��", "L": "�"}),
        (b"K\x01\xe0\x9f\xbf\xf4\x90\x80\x80\x02", {"K": "\ufffd" * 7}),
        (b"K\x01\xf4\x8f\xbf\xbf\xee\x80\x80\x02", {"K": "\U0010ffff\ue000"}),
        (b"K\x01\x00\x02\x00\x01\x00\x00", {"K": "\0", "\0": "\0\0"}),
        ("Schlüssel\x01Wert😀\x02".encode(), {"Schlüssel": "Wert😀"}),
    ],
)
def test_properties(properties: bytes, expected: dict[str, str]) -> None:
    assert agreed(raw(properties))["properties"] == expected


def test_the_last_of_two_wins_in_the_place_of_the_first() -> None:
    data = raw(b"A\x011\x02B\x012\x02A\x013\x02")
    frames = np.frombuffer(data, dtype=np.uint8).copy()
    (batch,) = batches(data, "3.x", [8])
    used = batch.columns
    found = Locator(frozenset({"properties"})).locate(frames, 0, used.phy_offset, used.size, used.store_timestamp)
    assert found.column("properties").to_pylist() == [[("A", "3"), ("B", "2")]]


@pytest.mark.parametrize("count", [PAIRS_MAX - 1, PAIRS_MAX, PAIRS_MAX + 1, 3000])
def test_many_properties_and_many_keys(count: int) -> None:
    properties = {f"p{number}": "v" for number in range(count)}
    assert agreed(encode_frame(FrameSpec("T", properties=properties), 0))["properties"] == properties
    keys = [f"k{number}" for number in range(count)]
    assert agreed(encode_frame(FrameSpec("T", properties={"KEYS": " ".join(keys)}), 0))["keys"] == keys


def test_properties_as_long_as_they_can_be() -> None:
    row = agreed(raw(b"K\x01" + b"v" * (32767 - 3) + b"\x02"))
    assert len(row["properties"]["K"]) == 32764


def test_slow_rows_stand_in_their_places_among_plain_ones() -> None:
    frames, data = [raw(b"n\x01%d\x02" % n if n % 3 else b"n\x010\x02n\x01%d\x02" % n) for n in range(20)], b""
    for frame in frames:
        data += encode_frame(FrameSpec("T"), len(data), raw_properties=frame[frame.index(b"n\x01") :])
    assert [row["properties"]["n"] for row in rows_by_kernel(data, ["properties"])] == [str(n) for n in range(20)]


def test_more_of_everything_than_there_is_room_for_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b""
    for number in range(1200 if JIT else 60):
        spec = FrameSpec(
            "T",
            born_host=(f"10.0.{number // 256}.{number % 256}", number),
            properties={"KEYS": "a b c d e f", **{f"p{n}": "v" for n in range(20)}},
        )
        data += encode_frame(spec, len(data))
    expected = rows_by_decoder(data, LOOKED_AT)
    assert rows_by_kernel(data, LOOKED_AT, 5000) == expected
    # Hosts are forgotten between two batches once they are many.
    monkeypatch.setattr(located_module, "_HOSTS_MAX", 10)
    assert rows_by_kernel(data, LOOKED_AT, 100) == expected


@pytest.mark.parametrize("address", ["1.2.3.4", "255.255.255.255", "::1", "fe80::1", "2001:db8::8:800:200c:417a", "::"])
def test_hosts_and_ids(address: str) -> None:
    row = agreed(encode_frame(FrameSpec("T", store_host=(address, 10911)), 0))
    assert row["storeHost"] == (f"[{address}]:10911" if ":" in address else f"{address}:10911")
    assert len(row["msgId"]) == (56 if ":" in address else 32)


def test_a_port_is_a_signed_int() -> None:
    assert host_text(bytes([1, 2, 3, 4]) + b"\xff\xff\xff\xfe") == "1.2.3.4:-2"


# --- what changes between the two looks ---


@pytest.mark.parametrize("position", [3, 7, 35, 63, 92])
def test_a_frame_that_is_another_by_now_is_not_taken(position: int) -> None:
    data = encode_frame(FrameSpec("T", body=b"body", properties={"KEYS": "k"}, store_timestamp=1 << 40), 0)
    (batch,) = batches(data, "3.x", [8])
    frames, used = np.frombuffer(data, dtype=np.uint8).copy(), batch.columns
    frames[position] ^= 1
    with pytest.raises(DisturbedError, match="written anew at 0"):
        Locator(frozenset({"body"})).locate(frames, 0, used.phy_offset, used.size, used.store_timestamp)


@given(logs(max_size=3), st.data())
def test_no_bytes_lead_outside_of_the_buffer(samples: list[Sample], data: st.DataObject) -> None:
    whole = encode(samples)
    rows = batches(whole, "3.x", [8])
    frames = np.frombuffer(whole, dtype=np.uint8).copy()
    for position in data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=6)) if samples else []:
        frames[position] = data.draw(st.integers(0, 255))
    frames = frames[: data.draw(st.integers(0, len(frames)))].copy()
    for batch in rows:
        used, locator = batch.columns, Locator(frozenset(ALL_COLUMNS))
        try:
            found = locator.locate(frames, 0, used.phy_offset, used.size, used.store_timestamp)
        except DisturbedError:
            continue
        for name in LOOKED_AT:
            found.column(name).validate(full=True)


# --- the pieces ---


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8))
def test_spans_are_gathered(text: bytes, pairs: list[tuple[int, int]]) -> None:
    spans = [tuple(sorted((min(a, len(text)), min(b, len(text))))) for a, b in pairs]
    starts, ends = (np.array([span[side] for span in spans], dtype=np.int64) for side in (0, 1))
    expected = b"".join(text[start:end] for start, end in spans)
    data = np.zeros(len(expected) + 8, dtype=np.uint8)
    assert int(gather(np.frombuffer(text, dtype=np.uint8).copy(), starts, ends, data)) == len(expected)
    assert data[: len(expected)].tobytes() == expected
