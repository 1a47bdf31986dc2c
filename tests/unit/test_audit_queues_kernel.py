"""The one look at every unit of a file, against the same in plain Python; run interpreted and bounds-checked, too."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.audit.queues.kernel import (
    BREAKS,
    EXPIRED,
    FIRST,
    FOUND_COLUMNS,
    HIGHEST,
    KIND_COUNT,
    LAST,
    LOWEST,
    NEGATIVE,
    ORDER,
    PREVIOUS,
    STATE_SIZE,
    scan_units,
)
from indexd.consumequeue.format import UNIT

Row = tuple[int, int, int]
_PHY = st.one_of(st.integers(0, 40), st.sampled_from([0, -1, -(1 << 63), (1 << 63) - 1, 1 << 32, (1 << 32) - 1]))
_SIZE = st.sampled_from([0, 1, 100, 2147483647, -1, -(1 << 31)])
_TAGS = st.sampled_from([0, 1, -1, -(1 << 63), 1 << 40])
_ROWS = st.lists(
    st.one_of(st.tuples(_PHY, _SIZE, _TAGS), st.sampled_from([(0, 0, 0), (0, 2147483647, 0)])), max_size=30
)


def naive(rows: list[Row], first: int, log_begin: int) -> tuple[list[int], dict[int, list[Row]]]:
    state = [0] * STATE_SIZE
    state[FIRST] = state[LAST] = -1
    found: dict[int, list[Row]] = {NEGATIVE: [], ORDER: []}
    for unit, (phy, size, tags) in enumerate(rows, first):
        if phy == 0 and (size == 2147483647 or (size, tags) == (0, 0)):
            continue
        if phy < 0:
            found[NEGATIVE].append((unit, phy, state[PREVIOUS]))
            state[BREAKS] += 1
            continue
        if phy < state[PREVIOUS]:
            found[ORDER].append((unit, phy, state[PREVIOUS]))
            state[BREAKS] += 1
        if state[FIRST] < 0:
            state[FIRST], state[LOWEST], state[HIGHEST] = unit, phy, phy
        elif state[LAST] != unit - 1:
            state[BREAKS] += 1
        state[LAST] = unit
        state[PREVIOUS] = phy
        state[LOWEST], state[HIGHEST] = min(state[LOWEST], phy), max(state[HIGHEST], phy)
        state[EXPIRED] += phy < log_begin
    return state, found


@given(
    rows=_ROWS, first=st.sampled_from([0, 1, 300_000, 1 << 40]), log_begin=st.integers(0, 40), cut=st.integers(0, 30)
)
def test_every_unit_is_looked_at_as_plain_python_does(rows: list[Row], first: int, log_begin: int, cut: int) -> None:
    state = np.zeros(STATE_SIZE, dtype=np.int64)
    state[FIRST] = state[LAST] = -1
    counts = np.zeros(KIND_COUNT, dtype=np.int64)
    found = np.full((KIND_COUNT, 3, FOUND_COLUMNS), -99, dtype=np.int64)
    for part, begin in ((rows[:cut], first), (rows[cut:], first + len(rows[:cut]))):
        data = b"".join(UNIT.pack(*row) for row in part)
        units = np.frombuffer(data, np.uint32).reshape(-1, 5)
        scan_units(units, begin, log_begin, state, counts, found)
    wanted, kept = naive(rows, first, log_begin)
    assert state.tolist() == wanted
    for kind, expected in kept.items():
        assert counts[kind] == len(expected)
        assert [tuple(row) for row in found[kind].tolist() if row[0] != -99] == expected[:3]
