"""check_entries against a plain twin, and every byte of a small file changed: what is found, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from indexd.index.format import FLAVOURS, IndexEntry, IndexHeader, unpack_entry
from indexd.output import Condition
from indexd.storage.disk import Disk
from support.data_directory import Store
from support.naive import NaiveIndexFile
from support.verifying import ENTRY, LAYOUT, files_of, small_store

Row = tuple[int, int, int, int]


def twin(
    rows: list[Row], slot_num: int, index_num: int, begin: int, end: int, *, every_put: bool
) -> tuple[list[Row], dict[int, int], int]:
    """(number, code, what stands there, what should) of each finding; the slots; the used slot count."""
    found: list[Row] = []
    slots: dict[int, int] = {}
    used, last = 0, begin
    for number, (key_hash, phy, time, previous) in enumerate(rows, 1):
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
        if key_hash < 0:
            found.append((number, HASH_NEGATIVE, key_hash, 0))
            continue
        old = slots.get(key_hash % slot_num, 0)
        if previous != old:
            code = PREVIOUS
            if not 0 <= previous < index_num:
                code = PREVIOUS_RANGE
            elif previous >= number:
                code = PREVIOUS_ITSELF if previous == number else PREVIOUS_LATER
            found.append((number, code, previous, old))
        used += old == 0 or every_put
        slots[key_hash % slot_num] = number
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
