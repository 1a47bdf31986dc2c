"""Entries beside messages, and walks along chains, against their plain twins."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.compare.index import (
    KINDS,
    TWICE,
    WITHOUT_KEY,
    WITHOUT_MESSAGE,
    WRONG_HASH,
    WRONG_TIME,
    ComparedFile,
    Keys,
    match_entries,
    numbered,
)
from indexd.index.check_kernel import walk_chains
from indexd.index.file import time_difference
from indexd.index.format import IndexHeader, IndexLayout
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk
from support.data_directory import T0


class Message(NamedTuple):
    phy_offset: int
    timestamp: int
    keys: list[int]


class Given(NamedTuple):
    key_hash: int
    phy_offset: int
    time_diff: int


def plain_match(messages: list[Message], entries: list[Given], unreachable: set[int]) -> tuple[list[str], Counter[int]]:
    """What each key came to, and how many entries of each kind; entries are numbered from 1."""
    kinds: Counter[int] = Counter()
    states: list[str] = []
    offsets = {message.phy_offset for message in messages}
    kinds[WITHOUT_MESSAGE] = sum(entry.phy_offset not in offsets for entry in entries)
    for message in messages:
        own = [(number, entry) for number, entry in enumerate(entries, 1) if entry.phy_offset == message.phy_offset]
        left, wrong = Counter(message.keys), 0
        for number, entry in own:
            if left[entry.key_hash]:
                left[entry.key_hash] -= 1
            elif entry.key_hash in message.keys:
                kinds[TWICE] += 1
            else:
                wrong += 1
            kinds[WRONG_TIME] += number > 1 and entry.time_diff != time_difference(message.timestamp, T0)
        kinds[WRONG_HASH] += min(wrong, left.total())
        kinds[WITHOUT_KEY] += max(wrong - left.total(), 0)
        found = {entry.key_hash for number, entry in own if number not in unreachable}
        given = Counter(entry.key_hash for _, entry in own)
        for key in message.keys:
            given[key] -= 1
            states.append("findable" if key in found else "missing" if given[key] < 0 else "unreachable")
    return states, +kinds


messages_of = st.lists(st.tuples(st.integers(0, 5000), st.lists(st.integers(1, 5), max_size=4)), max_size=6).map(
    lambda rows: [Message(100 * n, T0 + time, keys) for n, (time, keys) in enumerate(rows)]
)
strange = st.tuples(st.integers(1, 6), st.sampled_from([0, 100, 150, 200, 300, 555]), st.integers(0, 5))


@given(messages_of, st.data())
def test_match_entries_does_what_its_plain_twin_does(messages: list[Message], data: st.DataObject) -> None:
    right = [
        Given(key, message.phy_offset, time_difference(message.timestamp, T0))
        for message in messages
        for key in message.keys
    ]
    kept = data.draw(st.lists(st.sampled_from(right), max_size=len(right), unique_by=id) if right else st.just([]))
    extra = [Given(*row) for row in data.draw(st.lists(strange, max_size=4))]
    entries = sorted([*kept, *extra], key=lambda entry: entry.phy_offset)
    unreachable = data.draw(st.sets(st.integers(1, max(len(entries), 1))))
    keys = Keys(
        *(np.array([message[field] for message in messages], dtype=np.int64) for field in (0, 1)),
        np.array([row for row, message in enumerate(messages) for _ in message.keys], dtype=np.int64),
        np.array([key for message in messages for key in message.keys], dtype=np.uint32),
    )
    rows = np.array([[entry.key_hash, 0, entry.phy_offset, entry.time_diff, 0] for entry in entries], dtype=">u4")
    taken, findable = numbered(rows.reshape(-1, 5).view(np.uint32), 1), np.ones(len(entries), dtype=np.bool_)
    findable[sorted(number - 1 for number in unreachable if number <= len(entries))] = False
    match = match_entries(keys, taken, findable)
    wanted, kinds = plain_match(messages, entries, unreachable)
    states = np.select([~match.is_lost, match.is_missing], ["findable", "missing"], "unreachable").tolist()
    # Which of two equal keys an entry is given to does not matter.
    assert Counter(zip(keys.row.tolist(), keys.key_hash.tolist(), states, strict=True)) == Counter(
        zip(keys.row.tolist(), keys.key_hash.tolist(), wanted, strict=True)
    )
    file = ComparedFile(Disk(), Path("index"), IndexLayout(7, 41), IndexHeader(T0, index_count=len(entries) + 1))
    pairs = zip(entries, right, range(1, NEVER), strict=False)
    same = [there == due or (number == 1 and there[:2] == due[:2]) for there, due, number in pairs]
    assert file.count_right(keys, 0, taken) == [*same, False].index(False)
    file.judge(keys, taken, match)
    assert file.findings.counts == Counter({KINDS[kind][0]: count for kind, count in kinds.items()})
    astray = [entry.phy_offset for entry, kind in zip(entries, match.kind.tolist(), strict=True) if 0 < kind < TWICE]
    assert (file.strays, file.low, file.high) == (len(astray), min(astray, default=1 << 62), max(astray, default=-1))
    assert len(match.unpaired) == match.is_missing.sum() - kinds[WRONG_HASH]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 12), st.integers(-1, 3)), max_size=9),
    st.lists(st.integers(-2, 12), min_size=3, max_size=3),
)
def test_walk_chains_meets_what_a_walk_meets(entries: list[tuple[int, int, int]], slots: list[int]) -> None:
    rows = [(0, 0, 0), *entries]
    hashes = np.array([row[0] for row in rows], dtype=np.uint32)
    previous, differences = (np.array([row[column] for row in rows], dtype=np.int32) for column in (1, 2))
    findable, stamps = np.zeros(len(rows), dtype=np.uint8), np.zeros(len(rows), dtype=np.uint32)
    walk_chains(np.array(slots, dtype=np.int32), hashes, previous, differences, stamps, findable)
    wanted = set()
    for slot, first in enumerate(slots):
        number, steps = first, 0
        while 0 < number < len(rows) and steps <= len(rows) and rows[number][2] >= 0:
            if rows[number][0] % 3 == slot:
                wanted.add(number)
            number, steps = rows[number][1], steps + 1
    assert set(np.flatnonzero(findable).tolist()) == wanted
