"""The audit's kernels against their plain twins; and a sample of messages asked for as the broker asks."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.kernel import (
    FINDABLE,
    MISSING,
    NOTED_COLUMNS,
    NOTED_MAX,
    TIME_DIFFERENCE,
    TWICE,
    UNREACHABLE,
    WITHOUT_KEY,
    WITHOUT_MESSAGE,
    WRONG_HASH,
    count_missing,
    match_rows,
    walk_chains,
)
from indexd.audit.samples import WIDTHS, Answers
from indexd.commitlog.batcher import make_columns
from indexd.commitlog.kernel import Columns
from indexd.config import Config
from indexd.index.check import time_difference
from indexd.storage.disk import Disk
from support.auditing import config_of_golden
from support.data_directory import T0
from support.goldens import GOLDENS, unpack
from support.indexing_broker import Broker

ROLLBACK = 1 << 0xC
NEVER = 1 << 62


class Message(NamedTuple):
    phy_offset: int
    timestamp: int
    sys_flag: int
    keys: list[int]


class Entry(NamedTuple):
    key_hash: int
    phy_offset: int
    time_diff: int


def columns_of(messages: list[Message]) -> Columns:
    columns = make_columns(max(len(messages), 1), sum(len(message.keys) for message in messages))
    key = 0
    columns.key_start[0] = 0
    for row, message in enumerate(messages):
        columns.phy_offset[row], columns.store_timestamp[row] = message.phy_offset, message.timestamp
        columns.sys_flag[row] = message.sys_flag
        for key_hash in message.keys:
            columns.key_hash[key] = key_hash
            key += 1
        columns.key_start[row + 1] = key
    return columns


def entries_of(entries: list[Entry]) -> NDArray[np.uint32]:
    data = b"".join(struct.pack(">iqii", entry.key_hash, entry.phy_offset, entry.time_diff, 0) for entry in entries)
    return np.frombuffer(bytearray(data), dtype=np.uint32).reshape(-1, 5)


def plain_match(messages: list[Message], entries: list[Entry], unreachable: set[int]) -> tuple[list[int], Counter[int]]:
    """What each key came to, and how many entries of each kind; entries are numbered from 1."""
    kinds: Counter[int] = Counter()
    taken: list[int] = []
    offsets = [message.phy_offset for message in messages]
    last = max(offsets, default=-1)
    for message in messages:
        keys = message.keys if message.sys_flag != 0xC else []
        own = [MISSING] * len(keys)
        expected = 0
        for number, entry in enumerate(entries, 1):
            if entry.phy_offset != message.phy_offset:
                continue
            while expected < len(keys) and own[expected] != MISSING:
                expected += 1
            state = UNREACHABLE if number in unreachable else FINDABLE
            free = [k for k, key in enumerate(keys) if key == entry.key_hash and own[k] == MISSING]
            if free:
                # The one that is due, else the first.
                chosen = expected if expected in free else free[0]
                own[chosen] = state
                expected = max(expected, chosen + 1)
            elif entry.key_hash in keys:
                kinds[TWICE] += 1
                for k, key in enumerate(keys):
                    if state == FINDABLE and key == entry.key_hash and own[k] == UNREACHABLE:
                        own[k] = FINDABLE
                        break
            elif expected < len(keys):
                kinds[WRONG_HASH] += 1
                expected += 1
            else:
                kinds[WITHOUT_KEY] += 1
            if number > 1 and entry.time_diff != time_difference(message.timestamp, T0):
                kinds[TIME_DIFFERENCE] += 1
        taken += own + [MISSING] * (len(message.keys) - len(keys))
    kinds[WITHOUT_MESSAGE] = sum(entry.phy_offset not in offsets and entry.phy_offset < last for entry in entries)
    return taken, +kinds


messages_of = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([0, 0, 0, 4, 12]), st.lists(st.integers(1, 5), max_size=4)),
    max_size=6,
).map(lambda rows: [Message(100 * n, T0 + time, flag, keys) for n, (time, flag, keys) in enumerate(rows)])
strange = st.tuples(st.integers(1, 6), st.sampled_from([0, 100, 150, 200, 300, 555]), st.integers(0, 5))


@given(messages_of, st.data())
def test_match_rows_does_what_its_plain_twin_does(messages: list[Message], data: st.DataObject) -> None:
    right = [
        Entry(key, message.phy_offset, time_difference(message.timestamp, T0))
        for message in messages
        for key in message.keys
        if message.sys_flag != 12
    ]
    kept = data.draw(st.lists(st.sampled_from(right), max_size=len(right), unique_by=id) if right else st.just([]))
    extra = [Entry(*row) for row in data.draw(st.lists(strange, max_size=4))]
    entries = sorted([*kept, *extra], key=lambda entry: entry.phy_offset)
    entries = [entry for entry in entries if not messages or entry.phy_offset <= messages[-1].phy_offset]
    unreachable = data.draw(st.sets(st.integers(1, max(len(entries), 1))))
    window = data.draw(st.integers(1, 5))

    columns, rows = columns_of(messages), len(messages)
    taken = np.zeros(max(int(columns.key_start[rows]), 1), dtype=np.uint8)
    findable = np.ones(len(entries) + 1, dtype=np.uint8)
    findable[sorted(number for number in unreachable if number <= len(entries))] = 0
    header = np.array([T0, len(entries), -1, 0], dtype=np.int64)
    times = np.full(2, -1, dtype=np.int64)
    strays = np.array([NEVER, -1, 0], dtype=np.int64)
    counts = np.zeros(6, dtype=np.int64)
    noted = np.zeros((5 * NOTED_MAX, NOTED_COLUMNS), dtype=np.int64)
    all_entries, numbers = entries_of(entries), np.arange(1, len(entries) + 1, dtype=np.uint32)
    row = 0
    for begin in range(0, len(entries), window):
        part = all_entries[begin : begin + window].copy()
        row, at = match_rows(
            columns, row, rows, ROLLBACK, part, numbers[begin : begin + window].copy(), 0, findable, header, taken,
            times, strays, counts, noted,
        )  # fmt: skip
        assert rows == 0 or int(at) == len(part)
    if not messages:
        return
    wanted, kinds = plain_match(messages, entries, unreachable)
    astray = [row[4] for row in noted[: counts[5]].tolist() if row[1] in (WITHOUT_MESSAGE, WITHOUT_KEY, WRONG_HASH)]
    assert strays.tolist() == [min(astray, default=NEVER), max(astray, default=-1), len(astray)]
    assert dict(enumerate(counts[:5].tolist())) == {kind: kinds[kind] for kind in range(5)}
    assert Counter(noted[: counts[5], 1].tolist()) == kinds
    keys = [key for message in messages for key in message.keys]
    rowed = [n for n, message in enumerate(messages) for _ in message.keys]
    # Which of two equal keys an entry is given to does not matter.
    assert Counter(zip(rowed, keys, taken.tolist(), strict=False)) == Counter(zip(rowed, keys, wanted, strict=True))

    missing, totals = np.zeros(rows, dtype=np.int32), np.zeros(5, dtype=np.int64)
    count_missing(columns, 0, rows, ROLLBACK, taken, missing, totals)
    lost = []
    for n, message in enumerate(messages):
        found = {
            key for at, key, state in zip(rowed, keys, taken.tolist(), strict=False) if at == n and state == FINDABLE
        }
        keyed = message.keys if message.sys_flag != 12 else []
        lost.append(sum(key not in found for key in keyed) if keyed else -1)
    assert missing.tolist() == lost
    assert totals[:4].tolist() == [
        rows,
        sum(count >= 0 for count in lost),
        sum(len(message.keys) for message in messages if message.sys_flag != 12),
        sum(max(count, 0) for count in lost),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 12), st.integers(-1, 3)), max_size=9),
    st.lists(st.integers(-2, 12), min_size=3, max_size=3),
    st.sets(st.integers(0, 2), min_size=1),
)
def test_walk_chains_meets_what_a_walk_meets(
    entries: list[tuple[int, int, int]], slots: list[int], chosen: set[int]
) -> None:
    rows = [(0, 0, 0), *entries]
    hashes = np.array([row[0] for row in rows], dtype=np.uint32)
    previous, differences = (np.array([row[column] for row in rows], dtype=np.int32) for column in (1, 2))
    findable = np.zeros(len(rows), dtype=np.uint8)
    stamps = np.zeros(len(rows), dtype=np.uint32)
    order = np.array(sorted(chosen), dtype=np.uint32)
    walk_chains(order, np.array(slots, dtype=np.int32), hashes, previous, differences, stamps, findable)
    wanted = set()
    for slot in chosen:
        number, steps = slots[slot], 0
        while 0 < number < len(rows) and steps <= len(rows) and rows[number][2] >= 0:
            if rows[number][0] % 3 == slot:
                wanted.add(number)
            number, steps = rows[number][1], steps + 1
    assert set(np.flatnonzero(findable).tolist()) == wanted


def report_of(config: Config, samples: int = 50) -> AuditReport:
    return audit_here(config, Disk(), AuditOptions(samples=samples), lambda *_: None)


def answers_of(config: Config, samples: int = 50) -> Answers:
    answers = report_of(config, samples).answers
    assert answers is not None
    return answers


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    made = Broker(tmp_path)
    made.dispatch(made.messages)
    made.stopped()
    return made


@pytest.mark.parametrize("name", GOLDENS)
def test_rocketmq_finds_all_messages_of_its_own_stores(tmp_path: Path, name: str) -> None:
    found = answers_of(config_of_golden(unpack(name, tmp_path)))
    assert found.drawn == found.asked >= 40
    for share in found.shares:
        assert (share["queries"], share["missed"]) == (found.asked, 0)


def test_the_sample_is_spread_over_the_log(broker: Broker) -> None:
    assert 9 <= answers_of(broker.config, 10).drawn <= 10
    assert answers_of(broker.config, 1000).drawn == 90
    assert report_of(broker.config, 0).answers is None
    assert answers_of(broker.config, 10) == answers_of(broker.config, 10)


def test_what_is_in_a_hole_is_missed(broker: Broker) -> None:
    broker.files[1].unlink()
    found = answers_of(broker.config, 90)
    shares = {share["width"]: share for share in found.shares}
    assert list(shares) == list(WIDTHS)
    missed = shares["all time"]["missed"]
    assert 10 <= missed <= 20
    assert shares["minute"]["missed"] >= missed
    line = next(line for line in found.lines() if "without bounds" in line)
    text = f"the broker's own query misses {missed} of {found.asked} messages"
    assert line.startswith(f"queries without bounds of time: {text}")
    assert found.rows()[-1] == {"kind": "samples", "drawn": found.drawn, "asked": found.asked}
