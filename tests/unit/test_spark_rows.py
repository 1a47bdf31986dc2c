"""The messages of a split as Arrow batches, and the kernels that make them: what the plain decoder says."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import CorruptDataError, DisturbedError, UsageError
from indexd.spark.source.columns import ALL_COLUMNS, DEFAULT_COLUMNS, SCHEMA, VERSION_KEY, arrow_schema, parse_columns
from indexd.spark.source.rows import Frames, Keep
from indexd.spark.splits import Split, plan_splits
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame
from support.goldens import GOLDENS, unpack
from support.rows import config_of, plain, record_batches, rows_of, rows_of_log
from support.small_log import SEGMENT_SIZE, write_log
from support.strategies import Sample, logs
from support.twins import batches, encode

SMALL = 1 << 15


def rows_of_splits(
    store: Path, splits: list[Split], columns: tuple[str, ...], keep: Keep | None = None, segment_size: int = SMALL
) -> list[dict[str, Any]]:
    config = config_of(store, segment_size)
    found: list[dict[str, Any]] = []
    for split in splits:
        for batch in record_batches(Disk(), config, split, columns, keep):
            batch.validate(full=True)
            assert batch.num_rows
            assert batch.schema.equals(arrow_schema(columns), check_metadata=True)
            found += [plain(row) for row in batch.to_pylist()]
    return found


@settings(max_examples=25)
@given(st.data(), logs(max_size=25), st.booleans())
def test_rows_are_the_messages(data: st.DataObject, samples: list[Sample], prop_crc: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        with CommitLogWriter(store / "commitlog", SMALL, prop_crc=prop_crc) as writer:
            for sample in samples:
                sample.append(writer)
        splits = plan_splits(Disk(), config_of(store, SMALL), size=data.draw(st.integers(100, 2 * SMALL)))
        expected = rows_of_log(store / "commitlog")
        assert len(expected) == len(samples)
        assert rows_of_splits(store, splits, ALL_COLUMNS) == expected
        topics = data.draw(st.none() | st.frozensets(st.sampled_from([row["topic"] for row in expected] or ["T"])))
        times = [row["storeTimestamp"] for row in expected] or [0]
        bounds = [data.draw(st.none() | st.sampled_from(times)) for _ in range(2)]
        columns = tuple(data.draw(st.permutations(ALL_COLUMNS)))[: data.draw(st.integers(1, len(ALL_COLUMNS)))]
        kept = [
            {name: row[name] for name in columns}
            for row in expected
            if (topics is None or row["topic"] in topics)
            and (bounds[0] is None or row["storeTimestamp"] >= bounds[0])
            and (bounds[1] is None or row["storeTimestamp"] < bounds[1])
        ]
        assert rows_of_splits(store, splits, columns, Keep(topics, *bounds)) == kept


@pytest.mark.parametrize("name", GOLDENS)
def test_what_rocketmq_wrote(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    config = config_of(golden.root, golden.segment_size)
    splits = plan_splits(Disk(), config, size=golden.segment_size // 3)
    columns = ("phyOffset", "size", "topic", "queueId", "queueOffset", "storeTimestamp", "sysFlag", "tagsCode", "keys")
    columns += ("uniqKey", "tags", "preparedTransactionOffset")
    read = rows_of_splits(golden.root, splits, columns, segment_size=golden.segment_size)
    said = golden.messages()
    assert [row["phyOffset"] for row in read] == [row["phyOffset"] for row in said]
    for found, row in zip(read, said, strict=True):
        assert found["keys"] == [key for key in (row["keys"] or "").split(" ") if key]
        assert (found["topic"], found["queueId"], found["size"]) == (row["topic"], row["queueId"], row["size"])
        assert (found["queueOffset"], found["tagsCode"]) == (row["cqOffset"], row["tagsCode"])
        assert (found["uniqKey"], found["tags"], found["sysFlag"]) == (row["uniqKey"], row["tags"], row["sysFlag"])
        assert found["storeTimestamp"] == row["storeTimestamp"]
        assert found["preparedTransactionOffset"] == row["preparedTransactionOffset"]


def test_a_split_that_ends_elsewhere_is_an_error(tmp_path: Path) -> None:
    write_log(tmp_path, 3000)
    config = config_of(tmp_path, SEGMENT_SIZE)
    first, second = plan_splits(Disk(), config, size=SEGMENT_SIZE // 2)[:2]
    with pytest.raises(DisturbedError, match="the log has changed"):
        list(record_batches(Disk(), config, Split(first.begin, second.begin + 1)))


def test_unreadable_bytes_are_an_error_or_passed_over(tmp_path: Path) -> None:
    write_log(tmp_path, 3000)
    rows = rows_of_log(tmp_path / "commitlog")
    victim = rows[100]
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(victim["phyOffset"] + 4)
        file.write(b"\xff")
    config = config_of(tmp_path, SEGMENT_SIZE)
    (split, *_) = plan_splits(Disk(), config, size=SEGMENT_SIZE)
    with pytest.raises(CorruptDataError, match=f"corrupt at offset {victim['phyOffset']}"):
        list(record_batches(Disk(), config, split))
    skipping = config_of(tmp_path, SEGMENT_SIZE, on_corrupt="skip")
    batches = list(record_batches(Disk(), skipping, split, ("phyOffset",)))
    expected = [row["phyOffset"] for row in rows if row["phyOffset"] < SEGMENT_SIZE and row is not victim]
    assert [row["phyOffset"] for batch in batches for row in batch.to_pylist()] == expected


# --- columns ---


def test_the_schema_is_version_1() -> None:
    # What others have written down: a change here is a new version.
    assert SCHEMA.metadata == {VERSION_KEY: b"1"}
    assert [f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in SCHEMA] == [
        "phyOffset int64 not null",
        "size int32 not null",
        "topic string not null",
        "queueId int32 not null",
        "queueOffset int64 not null",
        "storeTimestamp int64 not null",
        "bornTimestamp int64 not null",
        "bornHost string not null",
        "storeHost string not null",
        "sysFlag int32 not null",
        "transactionType string not null",
        "reconsumeTimes int32 not null",
        "preparedTransactionOffset int64 not null",
        "keys list<element: string not null> not null",
        "uniqKey string",
        "tags string",
        "tagsCode int64 not null",
        "properties map<string, string> not null",
        "msgId string not null",
        "body binary not null",
    ]
    assert not SCHEMA.field("properties").type.item_field.nullable


def test_columns_are_named_in_any_case_and_order() -> None:
    assert parse_columns(None) == DEFAULT_COLUMNS
    assert "body" not in DEFAULT_COLUMNS
    assert parse_columns("*") == ALL_COLUMNS
    assert parse_columns(" BODY, phyoffset") == ("body", "phyOffset")
    assert arrow_schema(("body",)).field("body").type == pa.binary()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("bodi", "there is no column 'bodi'", "did you mean body"),
        ("", "there is no column ''", "there are phyOffset"),
        ("size,size", "the column size is given twice", "once"),
        ("body,*", "the column body is given twice", "once"),
    ],
)
def test_columns_that_there_are_not(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_columns(text)
    assert hint in error.value.hint


JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
#: Those for which frames are looked at.
LOOKED_AT = [
    "bornTimestamp", "bornHost", "storeHost", "reconsumeTimes", "preparedTransactionOffset", "keys", "uniqKey", "tags",
    "properties", "msgId", "body",
]  # fmt: skip


def frames_of(frames: NDArray[np.uint8], base: int, batch: DispatchBatch) -> Frames:
    used = batch.columns
    return Frames(frames, base, *(one[: batch.rows] for one in (used.phy_offset, used.size, used.store_timestamp)))


def looked_at(batch: DispatchBatch, data: bytes, base: int, columns: list[str]) -> list[dict[str, Any]]:
    """Rows of these columns, their types being the schema's."""
    part = data[batch.begin_offset - base : batch.end_offset - base]
    frames = np.frombuffer(part, dtype=np.uint8).copy()
    found = frames_of(frames, batch.begin_offset, batch)
    arrays = {name: found.column(name) for name in columns}
    frames[:] = 0xEE  # the buffer is used again: nothing may be kept of it
    for name, array in arrays.items():
        array.validate(full=True)
        assert array.type == SCHEMA.field(name).type
        assert SCHEMA.field(name).nullable or array.null_count == 0
    return [plain({name: array[row].as_py() for name, array in arrays.items()}) for row in range(batch.rows)]


def rows_by_kernel(data: bytes, columns: list[str], rows_max: int = 7, base: int = 0) -> list[dict[str, Any]]:
    return [row for batch in batches(data, "3.x", [rows_max], base) for row in looked_at(batch, data, base, columns)]


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
    found = frames_of(frames, 0, batch)
    assert found.column("properties").to_pylist() == [[("A", "3"), ("B", "2")]]


@pytest.mark.parametrize("count", [1, 3000])
def test_many_properties_and_many_keys(count: int) -> None:
    properties = {f"p{number}": "v" for number in range(count)}
    assert agreed(encode_frame(FrameSpec("T", properties=properties), 0))["properties"] == properties
    keys = [f"k{number}" for number in range(count)]
    assert agreed(encode_frame(FrameSpec("T", properties={"KEYS": " ".join(keys)}), 0))["keys"] == keys


def test_much_of_everything() -> None:
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


@pytest.mark.parametrize("address", ["1.2.3.4", "255.255.255.255", "::1", "fe80::1", "2001:db8::8:800:200c:417a", "::"])
def test_hosts_and_ids(address: str) -> None:
    row = agreed(encode_frame(FrameSpec("T", store_host=(address, 10911)), 0))
    assert row["storeHost"] == (f"[{address}]:10911" if ":" in address else f"{address}:10911")
    assert len(row["msgId"]) == (56 if ":" in address else 32)


# --- what changes between the two looks ---


@pytest.mark.parametrize("position", [3, 7, 35, 63, 92])
def test_a_frame_that_is_another_by_now_is_not_taken(position: int) -> None:
    data = encode_frame(FrameSpec("T", body=b"body", properties={"KEYS": "k"}, store_timestamp=1 << 40), 0)
    (batch,) = batches(data, "3.x", [8])
    frames = np.frombuffer(data, dtype=np.uint8).copy()
    frames[position] ^= 1
    with pytest.raises(DisturbedError, match="written anew at 0"):
        frames_of(frames, 0, batch)


@given(logs(max_size=3), st.data())
def test_no_bytes_lead_outside_of_the_buffer(samples: list[Sample], data: st.DataObject) -> None:
    whole = encode(samples)
    rows = batches(whole, "3.x", [8])
    frames = np.frombuffer(whole, dtype=np.uint8).copy()
    for position in data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=6)) if samples else []:
        frames[position] = data.draw(st.integers(0, 255))
    frames = frames[: data.draw(st.integers(0, len(frames)))].copy()
    for batch in rows:
        try:
            found = frames_of(frames, 0, batch)
        except DisturbedError:
            continue
        for name in LOOKED_AT:
            found.column(name).validate(full=True)
