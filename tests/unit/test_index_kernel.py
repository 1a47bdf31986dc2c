"""putKey, the replay of entries and their check, against plain twins (spec 3, 12)."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexd.findings import Findings
from indexd.index.check import ENTRY_KINDS, check_file, time_difference
from indexd.index.check_kernel import (
    FOUND,
    HASH_NEGATIVE,
    LAST_PHY_OFFSET,
    PHY_NEGATIVE,
    PHY_ORDER,
    PHY_OUTSIDE,
    PREVIOUS,
    PREVIOUS_ITSELF,
    PREVIOUS_LATER,
    PREVIOUS_RANGE,
    TIME_NEGATIVE,
    USED_SLOT_COUNT,
    check_entries,
)
from indexd.index.entries import read_entries, replay_file
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, Flavour, IndexEntry, IndexHeader, IndexLayout, index_key_hash, unpack_entry
from indexd.index.kernel import DONE, FILE_FULL
from indexd.index.reader import IndexFileReader
from indexd.output import Condition
from indexd.storage.disk import Disk
from support.data_directory import Store
from support.naive import NaiveIndexFile, key_hash
from support.strategies import BASE_TIME, ZERO_HASH, Sample, logs, pieces, store_timestamps, topics
from support.twins import batches, encode, put_key
from support.verifying import ENTRY, LAYOUT, files_of, small_store

FOREVER = (0, 2**63 - 1)
EXTREME = st.one_of(store_timestamps(), st.sampled_from([2**63 - 1, -(2**63), 2**62, -(2**62), 1000, 999]))
PUTS = st.lists(st.tuples(topics(), pieces(), st.integers(0, 2**63 - 1), EXTREME), max_size=30)


@contextmanager
def new_file(slots: int, entries: int, previous: IndexHeader | None = None) -> Iterator[IndexFile]:
    with tempfile.TemporaryDirectory() as directory:
        file = IndexFile.create(Disk(), Path(directory) / "20240101000000000", IndexLayout(slots, entries), previous)
        yield file
        file.close()


def published(file: IndexFile) -> bytes:
    file.publish()
    return file.path.read_bytes()


# --- vectors: spec 12, 3.3 ---

VECTOR = [("a", 1000, 1000000500), ("a", 1100, 1000003499), ("b", 1200, 999000000), ("c", 1300, 1000009000)]


def test_the_index_file_vector() -> None:
    entries = [(0, 0, 0, 0), (81906, 1000, 0, 0), (81906, 1100, 2, 1), (81907, 1200, 0, 0), (81908, 1300, 8, 0)]
    expected = struct.pack(">qqqqii4i", 1000000500, 1000009000, 1000, 1300, 3, 5, 4, 0, 2, 3)
    expected += b"".join(struct.pack(">iqii", *entry) for entry in entries)
    flavour = FLAVOURS["5.4"]
    with new_file(4, 5) as file:
        for key, phy_offset, time in VECTOR:
            assert file.header.index_count < file.layout.index_num
            assert put_key(file, "T", key, phy_offset, time, flavour) == DONE
        assert file.header.index_count == file.layout.index_num
        assert put_key(file, "T", "d", 1400, 1000009000, flavour) == FILE_FULL
        assert published(file) == expected
        wanted = index_key_hash("T", "a")
        assert IndexFileReader(file.file, file.layout).select_phy_offset(wanted, 64, *FOREVER) == [1100, 1000]
        assert IndexFileReader(file.file, file.layout).select_phy_offset(wanted, 64, 1000003499, 2**63 - 1) == []
        assert IndexFileReader(file.file, file.layout).select_phy_offset(wanted, 64, 0, 1000002500) == [1100, 1000]
        assert IndexFileReader(file.file, file.layout).select_phy_offset(wanted, 1, *FOREVER) == [1100]
        assert IndexFileReader(file.file, file.layout).select_phy_offset(wanted, 0, *FOREVER) == []
        header = file.header
    with new_file(4, 5, header) as file:
        head = struct.pack(">qqqqi", 1000009000, 1000009000, 1300, 1300, 0)
        assert published(file) == head + bytes(4 + 16 + 100)
        put_key(file, "T", "z", 5000, 1000019000, flavour)
        head = struct.pack(">qqqqii", 1000019000, 1000019000, 5000, 5000, 1, 2)
        body = struct.pack(">4i", 0, 0, 0, 1) + bytes(20) + struct.pack(">iqii", 81931, 5000, 10, 0) + bytes(60)
        assert published(file) == head + body


def test_an_empty_file_counts_zero_on_disk_until_it_is_flushed() -> None:
    with new_file(3, 4) as file:
        assert published(file)[36:40] == bytes(4)
        assert file.header.entries == 0
        file.flush()
        assert file.path.read_bytes()[36:40] == b"\0\0\0\1"
        assert IndexFileReader(file.file, file.layout).select_phy_offset(1, 64, *FOREVER) == []


def test_a_hash_of_the_smallest_int_is_zero_and_in_slot_zero() -> None:
    with new_file(7, 3) as file:
        put_key(file, *ZERO_HASH, 5, 5, FLAVOURS["5.4"])
        assert published(file)[40:44] == struct.pack(">i", 1)
        assert IndexFileReader(file.file, file.layout).select_phy_offset(0, 64, *FOREVER) == [5]


# --- any puts ---


@given(PUTS, st.integers(1, 50), st.integers(2, 20), st.sampled_from(list(FLAVOURS)), EXTREME)
def test_puts_make_the_naive_file(puts: list[tuple], slots: int, entries: int, flavour: str, previous: int) -> None:
    every_put = FLAVOURS[flavour].counts_every_put
    header = IndexHeader(0, previous, 0, abs(previous) if previous > -(2**63) else 0)
    naive = NaiveIndexFile(slots, entries, header.end_phy_offset, header.end_timestamp, every_put)
    with new_file(slots, entries, header) as file:
        assert published(file) == naive.to_bytes()
        for topic, key, phy_offset, time in puts:
            put = put_key(file, topic, key, phy_offset, time, FLAVOURS[flavour])
            assert (put == DONE) == naive.put_key(f"{topic}#{key}", phy_offset, time)
            assert (file.header.index_count == file.layout.index_num) == naive.is_write_full()
        assert published(file) == naive.to_bytes()
        file.flush()
        assert file.path.read_bytes() == naive.to_bytes(flushed=True)
        loaded = IndexFile.load(Disk(), file.path, file.layout, file.mark(full=False))
        put_key(loaded, "T", "later", 7, 7, FLAVOURS[flavour])
        naive.put_key("T#later", 7, 7)
        assert published(loaded) == naive.to_bytes(flushed=True)
        loaded.close()


@given(PUTS, st.integers(1, 8), EXTREME, EXTREME, st.sampled_from([0, 1, 3, 64]))
def test_answers_are_the_naive_files(puts: list[tuple], slots: int, begin: int, end: int, max_num: int) -> None:
    naive = NaiveIndexFile(slots, 40)
    with new_file(slots, 40) as file:
        for topic, key, phy_offset, time in puts:
            put_key(file, topic, key, phy_offset, time, FLAVOURS["5.4"])
            naive.put_key(f"{topic}#{key}", phy_offset, time)
        file.publish()
        for first, last in ((begin, end), FOREVER, (end, begin)):
            assert file.header.is_time_matched(first, last) == naive.is_time_matched(first, last)
            for topic, key, _, _ in puts[:5]:
                wanted: list[int] = []
                naive.select_phy_offset(wanted, f"{topic}#{key}", max_num, first, last)
                assert (
                    IndexFileReader(file.file, file.layout).select_phy_offset(
                        key_hash(f"{topic}#{key}"), max_num, first, last
                    )
                    == wanted
                )


def test_only_changed_pages_of_slots_are_written_and_all_of_them() -> None:
    """More slots than a page holds, and more entries than the buffer does at once."""
    slots, entries = 5000, 700
    naive = NaiveIndexFile(slots, entries)
    with new_file(slots, entries) as file:
        for number in range(entries):
            put_key(file, "T", f"key-{number * number}", number, BASE_TIME + number, FLAVOURS["5.4"])
            naive.put_key(f"T#key-{number * number}", number, BASE_TIME + number)
            if number % 97 == 0:
                assert published(file) == naive.to_bytes()
        assert published(file) == naive.to_bytes()


# --- replay: what recovery trusts ---


def entries_of(file: IndexFile) -> NDArray[np.uint32]:
    return read_entries(file.file, file.layout, 1, file.header.entries)


def replayed(file: IndexFile, entries: NDArray[np.uint32], flavour: Flavour, window: int) -> tuple[int, int, bytes]:
    """(entries that hold, used slot count, slots) of the file with these entries, which are read in windows."""
    file.file.pwrite(entries.tobytes(), file.layout.entry_position(1))
    with mock.patch("indexd.index.entries.ENTRIES_PER_READ", window):
        found = replay_file(file.file, file.mark(full=False), file.layout, flavour)
    assert found.dropped_entries == len(entries) - found.mark.header.entries
    return found.mark.header.entries, found.mark.header.used_slot_count, found.slots.tobytes()


@given(st.data(), logs(max_size=12), st.integers(1, 9), st.integers(1, 6), st.sampled_from(list(FLAVOURS)))
def test_a_replay_rebuilds_the_slots(
    data: st.DataObject, samples: list[Sample], slots: int, window: int, name: str
) -> None:
    flavour = FLAVOURS[name]
    with new_file(slots, 300) as file:
        for batch in batches(encode(samples), name, [5]):
            file.put_batch(batch, flavour, 0, -1)
        raw = published(file)
        entries = entries_of(file)
        count = len(entries)
        expected = (count, file.header.used_slot_count, raw[40 : 40 + 4 * slots])
        assert replayed(file, entries, flavour, window) == expected
        if count:
            bad = data.draw(st.integers(0, count - 1))
            broken = entries.copy()
            if data.draw(st.booleans()):
                broken[bad, 4] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
            else:
                # The sign of the key hash, of the physical offset or of the time difference.
                broken[bad, data.draw(st.sampled_from([0, 1, 3]))] ^= np.uint32(0x80)
            assert replayed(file, broken, flavour, window)[0] == bad


def test_a_replay_ends_where_offsets_go_back_and_refuses_another_file() -> None:
    flavour = FLAVOURS["5.4"]
    with new_file(3, 10) as file:
        for phy_offset in (5, 9, 9, 8, 10):
            put_key(file, "T", "k", phy_offset, 1, flavour)
        file.publish()
        entries = entries_of(file)
        assert replayed(file, entries, flavour, 100)[:2] == (3, 1)
        entries[3, 2] = entries[2, 2]
        for number, low in ((0, 6), (4, 9)):
            other = entries.copy()
            other[number, 2] = np.uint32(low).byteswap()
            assert replayed(file, other, flavour, 100)[:2] == (0, 0)


Row = tuple[int, int, int, int]


def twin(
    rows: list[Row], slot_num: int, index_num: int, begin: int, end: int, *, every_put: bool
) -> tuple[list[Row], dict[int, int], int]:
    """(number, code, what stands there, what should) of each finding; the slots; the used slot count."""
    found: list[Row] = []
    slots: dict[int, int] = {}
    used, last = 0, begin
    for number, (hashed, phy, time, previous) in enumerate(rows, 1):
        if phy < 0:
            found.append((number, PHY_NEGATIVE, phy, last))
        elif not begin <= phy <= end:
            found.append((number, PHY_OUTSIDE, phy, last))
        else:
            if phy < last:
                found.append((number, PHY_ORDER, phy, last))
            last = phy
        if time < 0:
            found.append((number, TIME_NEGATIVE, time, 0))
        if hashed < 0:
            found.append((number, HASH_NEGATIVE, hashed, 0))
            continue
        old = slots.get(hashed % slot_num, 0)
        if previous != old:
            code = PREVIOUS
            if not 0 <= previous < index_num:
                code = PREVIOUS_RANGE
            elif previous >= number:
                code = PREVIOUS_ITSELF if previous == number else PREVIOUS_LATER
            found.append((number, code, previous, old))
        used += old == 0 or every_put
        slots[hashed % slot_num] = number
    return found, slots, used


def by_kernel(
    rows: list[Row], slot_num: int, index_num: int, begin: int, end: int, cut: int, *, every_put: bool
) -> tuple[list[Row], dict[int, int], int, list[int]]:
    """The same in two windows."""
    entries = np.frombuffer(b"".join(ENTRY.pack(*row) for row in rows), dtype=np.uint32).reshape(-1, 5)
    slots = np.zeros(slot_num, dtype=np.uint32)
    counts, found = np.zeros(len(ENTRY_KINDS), dtype=np.int64), np.zeros((40, 4), dtype=np.int64)
    state = np.zeros(3, dtype=np.int64)
    state[LAST_PHY_OFFSET] = begin
    for first, window in ((1, entries[:cut]), (1 + cut, entries[cut:])):
        check_entries(window, first, slots, every_put, index_num, begin, end, state, counts, found)
    named = {slot: int(value) for slot, value in enumerate(slots.byteswap().tolist()) if value}
    listed = [(row[0], row[1], row[2], row[3]) for row in found[: state[FOUND]].tolist()]
    return listed, named, int(state[USED_SLOT_COUNT]), counts.tolist()


I32, I64 = st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
SMALL = st.integers(0, 12)
ROWS = st.lists(st.tuples(SMALL | I32, SMALL | I64, SMALL | I32, SMALL | I32), max_size=20)
CUTS, OFFSETS = st.integers(0, 20), SMALL | st.integers(0, (1 << 63) - 1)


@given(ROWS, st.integers(1, 5), st.integers(2, 30), OFFSETS, OFFSETS, CUTS, st.booleans())
def test_the_kernel_finds_what_its_twin_finds(
    rows: list[Row], slot_num: int, index_num: int, begin: int, end: int, cut: int, every_put: bool
) -> None:
    found, slots, used = twin(rows, slot_num, index_num, begin, end, every_put=every_put)
    listed, named, counted, counts = by_kernel(rows, slot_num, index_num, begin, end, cut, every_put=every_put)
    assert listed == found[:40]
    assert (named, counted) == (slots, used)
    assert counts == [sum(row[1] == code for row in found) for code in range(len(ENTRY_KINDS))]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 50)), max_size=20), st.booleans())
def test_what_putkey_writes_is_sound(puts: list[tuple[str, int]], every_put: bool) -> None:
    file = NaiveIndexFile(3, 30, every_put=every_put)
    for number, (key, step) in enumerate(puts):
        file.put_key(key, 100 * number + step, 1_700_000_000_000 + 900 * number)
    rows = file.entries[1:]
    found, named, used, _ = by_kernel(
        rows, 3, 30, file.begin_phy_offset, file.end_phy_offset, len(rows) // 2, every_put=every_put
    )
    assert (found, used) == ([], file.hash_slot_count)
    assert named == {slot: value for slot, value in enumerate(file.slots) if value}


# --- every byte ---


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


def checked(store: Store, number: int, condition: Condition = Condition.AT_REST) -> Findings:
    mark = store.frontier.index[number]
    with Disk().open_read(store.data / "index" / mark.name) as file:
        return check_file(file, mark, LAYOUT, FLAVOURS[store.flavour], condition, lambda _: None)


def is_harmless(original: bytes, data: bytes, position: int, header: IndexHeader) -> bool:
    """Whether the file could have come from another log: what only a look at the log can tell."""
    number, byte = divmod(position - LAYOUT.entry_position(0), 20)
    if not 0 < number < header.index_count or byte >= 16:
        return False

    def entry(at: int) -> IndexEntry:
        return unpack_entry(data[LAYOUT.entry_position(at) :][:20])

    changed = entry(number)
    if byte < 4:
        was = unpack_entry(original[LAYOUT.entry_position(number) :][:20]).key_hash
        return changed.key_hash >= 0 and LAYOUT.slot_of(changed.key_hash) == LAYOUT.slot_of(was)
    if byte < 12:
        below = entry(number - 1).phy_offset if number > 1 else header.begin_phy_offset
        above = entry(number + 1).phy_offset if number + 1 < header.index_count else header.end_phy_offset
        is_edge = number == 1 or number + 1 == header.index_count
        return below <= changed.phy_offset <= above and not is_edge
    return changed.time_diff >= 0


@pytest.mark.parametrize("number", [0, 2, 3])
def test_every_changed_byte_is_found_or_could_be_another_logs(store: Store, number: int) -> None:
    path, header = files_of(store)[number], store.frontier.index[number].header
    data = path.read_bytes()
    assert len(checked(store, number)) == 0
    missed = 0
    for position in range(LAYOUT.file_size):
        for change in (0x01, 0x07, 0x80, 0xFF):
            wrong = data[:position] + bytes([data[position] ^ change]) + data[position + 1 :]
            path.write_bytes(wrong)
            harmless = is_harmless(data, wrong, position, header)
            findings = checked(store, number)
            assert (len(findings) == 0) == harmless, (position, change, findings)
            assert all(0 <= finding.position < LAYOUT.file_size for finding in findings.kept)
            missed += harmless
    assert missed
    # Of a file that was cut short, only what its durable entries say is asked.
    path.write_bytes(data)
    assert len(checked(store, number, Condition.CUT_SHORT)) == 0


def test_one_wrong_entry_stays_one(store: Store) -> None:
    path = files_of(store)[1]
    data = path.read_bytes()
    position = LAYOUT.entry_position(4) + 16
    path.write_bytes(data[:position] + b"\0\0\0\x09" + data[position + 4 :])
    assert [finding.position for finding in checked(store, 1).kept] == [position]


def test_time_differences_wrap_as_javas() -> None:
    assert time_difference(5000, 0) == 0
    assert time_difference(5000, 3001) == 1
    assert time_difference(3000, 5000) == 0
    assert time_difference(1 << 62, 1) == (1 << 31) - 1
    assert time_difference(-(1 << 63), 1) == (1 << 31) - 1
