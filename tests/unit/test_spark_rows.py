"""Splits and the rows that are read of them: each message once and in order, as the plain decoder says."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.cursor import SplitPoints
from indexd.config import Config
from indexd.errors import DisturbedError, UsageError
from indexd.recovery.open import decode_rules
from indexd.spark.source.columns import ALL_COLUMNS, SCHEMA, VERSION_KEY, arrow_schema, parse_columns
from indexd.spark.source.rows import OF_BATCH, Frames, RowFilter
from indexd.spark.splits import Split, SplitReader, plan_splits
from indexd.storage.disk import Disk
from support.beside_log import frames, over_queues, spec, write
from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame
from support.rows import config_of, plain, record_batches, rows_of, rows_of_log
from support.small_log import BASE_TIME
from support.strategies import Sample, logs
from support.twins import batches, encode

SPLIT_SEGMENT = 16 << 10
DISK = Disk()


def read(config: Config, splits: list[Split]) -> tuple[list[int], list[int]]:
    """(physical offsets, where each split ended)."""
    found: list[int] = []
    ends = []
    for split in splits:
        reader = SplitReader(DISK, config, split)
        for item in reader:
            assert isinstance(item, DispatchBatch)
            offsets = item.columns.phy_offset[: item.rows].tolist()
            assert all(split.begin <= offset < split.end for offset in offsets)
            found += offsets
        ends.append(reader.next_offset)
        if reader.ends_log:
            break
    return found, ends


def check(config: Config, store: Path, splits: list[Split], begin: int = 0, end: int = 1 << 62) -> None:
    wanted = [message.phy_offset for message in frames(store, config.store.segment_size)]
    found, ends = read(config, splits)
    assert found == [offset for offset in wanted if begin <= offset < end]
    assert all(first.end == second.begin for first, second in pairwise(splits))
    assert all(split.size > 0 for split in splits)
    assert ends[:-1] == [split.end for split in splits[: len(ends) - 1]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four segments, the last one half full and one made ahead; 16 KiB each."""
    store = tmp_path_factory.mktemp("splits") / "store"
    write(store, over_queues(200, 6), SPLIT_SEGMENT)
    (store / "commitlog" / f"{max(int(p.name) for p in (store / 'commitlog').iterdir()) + SPLIT_SEGMENT:020d}").touch()
    return store


def test_every_byte_of_a_segment_is_a_boundary_once(log: Path) -> None:
    config = config_of(log, SPLIT_SEGMENT)
    starts = [message.phy_offset for message in frames(log, SPLIT_SEGMENT)]
    points = SplitPoints(DISK, config.store.commit_log_directories, SPLIT_SEGMENT, decode_rules(config), 4096)
    for base in (SPLIT_SEGMENT, 3 * SPLIT_SEGMENT):
        ours = [start for start in starts if base <= start < base + SPLIT_SEGMENT]
        for offset in range(base, base + SPLIT_SEGMENT, 3):
            assert points.at(offset, base) == next((start for start in ours if start >= offset), None)
    points.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_the_log_in_any_splits(log: Path, data: st.DataObject) -> None:
    config = config_of(log, SPLIT_SEGMENT)
    end = data.draw(st.integers(0, 5 * SPLIT_SEGMENT))
    begin = data.draw(st.integers(0, end))
    size = data.draw(st.integers(1000, 2 * SPLIT_SEGMENT))
    check(config, log, plan_splits(DISK, config, size=size, begin=begin, end=end), begin, end)


def test_what_looks_like_a_message_inside_a_body_is_no_place_to_begin(tmp_path: Path) -> None:
    store, end = tmp_path / "store", 0
    for number in range(12):
        # Its body holds, behind so many bytes, a whole message that claims to stand there.
        begin = 500 + 7 * number
        inner = encode_frame(spec(number, body=300), end + 84 + begin)
        outer = FrameSpec("T", bytes(begin) + inner + bytes(50), store_timestamp=BASE_TIME)
        end = write(store, [outer, spec(number)], SPLIT_SEGMENT)
    write(store, over_queues(100, 2), SPLIT_SEGMENT)
    config = config_of(store, SPLIT_SEGMENT)
    for size in (91, 1000):
        check(config, store, plan_splits(DISK, config, size=size))


def test_behind_a_blank_record_lies_what_a_longer_log_has_left(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, [spec(number) for number in range(200)], SPLIT_SEGMENT)
    cut = [message.phy_offset for message in frames(store, SPLIT_SEGMENT) if message.phy_offset < SPLIT_SEGMENT][-20]
    # The first message of the rewritten part does not fit any more: a blank record, and stale frames behind it.
    write(store, [spec(300, body=9000)], SPLIT_SEGMENT, at=cut)
    config = config_of(store, SPLIT_SEGMENT)
    for size in (200, 5000):
        check(config, store, plan_splits(DISK, config, size=size))


def test_a_log_that_expired_is_no_silent_result(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, over_queues(300, 3), SPLIT_SEGMENT)
    config = config_of(store, SPLIT_SEGMENT)
    splits = plan_splits(DISK, config, size=4096)
    (store / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(DisturbedError, match="expired while it was read"):
        read(config, splits)


SMALL = 1 << 15


def rows_of_splits(
    store: Path, splits: list[Split], columns: tuple[str, ...], keep: RowFilter | None = None, segment_size: int = SMALL
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
        assert rows_of_splits(store, splits, columns, RowFilter(topics, *bounds)) == kept


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
    found = [parse_columns(text) for text in (None, "*", " BODY, phyoffset")]
    assert found == [ALL_COLUMNS[:-1], ALL_COLUMNS, ("body", "phyOffset")]


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


def agreed(data: bytes) -> list[dict[str, Any]]:
    """The rows of a log of these frames, on which reader and decoder agree."""
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        (store / "commitlog").mkdir()
        size = -(-len(data) // SMALL) * SMALL
        (store / "commitlog" / f"{0:020d}").write_bytes(data.ljust(size, b"\0"))
        rows = rows_of_splits(store, [Split(0, len(data))], ALL_COLUMNS, segment_size=size)
    assert rows == rows_of(data)
    return rows


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
    assert agreed(raw(properties))[0]["properties"] == expected


def frames_of(data: bytes, batch: DispatchBatch) -> Frames:
    columns = batch.columns
    places = (one[: batch.rows] for one in (columns.phy_offset, columns.size, columns.store_timestamp))
    return Frames(np.frombuffer(data, dtype=np.uint8), 0, *places)


def test_the_last_of_two_wins_in_the_place_of_the_first() -> None:
    data = raw(b"A\x011\x02B\x012\x02A\x013\x02")
    (batch,) = batches(data, "3.x", [8])
    assert frames_of(data, batch).column("properties").to_pylist() == [[("A", "3"), ("B", "2")]]


def test_much_of_everything() -> None:
    many = {"KEYS": " ".join(f"k{number}" for number in range(1500)), **{f"p{number}": "v" for number in range(1500)}}
    data = encode_frame(FrameSpec("T", properties=many), 0)
    for number in range(1200):
        properties = {"KEYS": "a b c d e f", **{f"p{n}": "v" for n in range(20)}}
        host = (f"10.0.{number // 256}.{number % 256}", number)
        data += encode_frame(FrameSpec("T", born_host=host, properties=properties), len(data))
    assert len(agreed(data)) == 1201


@pytest.mark.parametrize("address", ["1.2.3.4", "255.255.255.255", "::1", "fe80::1", "2001:db8::8:800:200c:417a", "::"])
def test_hosts_and_ids(address: str) -> None:
    (row,) = agreed(encode_frame(FrameSpec("T", store_host=(address, 10911)), 0))
    assert row["storeHost"] == (f"[{address}]:10911" if ":" in address else f"{address}:10911")
    assert len(row["msgId"]) == (56 if ":" in address else 32)


# --- what changes between the two looks ---


@pytest.mark.parametrize("position", [3, 7, 35, 63, 92])
def test_a_frame_that_is_another_by_now_is_not_taken(position: int) -> None:
    data = encode_frame(FrameSpec("T", body=b"body", properties={"KEYS": "k"}, store_timestamp=1 << 40), 0)
    (batch,) = batches(data, "3.x", [8])
    with pytest.raises(DisturbedError, match="written anew at 0"):
        frames_of(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], batch)


@given(logs(max_size=3), st.data())
def test_no_bytes_lead_outside_of_the_buffer(samples: list[Sample], data: st.DataObject) -> None:
    whole = bytearray(encode(samples))
    rows = batches(bytes(whole), "3.x", [8])
    for position in data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=6)) if samples else []:
        whole[position] = data.draw(st.integers(0, 255))
    frames = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for batch in rows:
        try:
            found = frames_of(frames, batch)
        except DisturbedError:
            continue
        for name in set(ALL_COLUMNS) - {*OF_BATCH, "topic", "transactionType"}:
            found.column(name).validate(full=True)
