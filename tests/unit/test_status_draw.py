"""status: what is a finding, how rates are made, what is drawn, and what HTTP's texts are turned back into."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.cli.status import Look, draw, from_text64, rates
from indexd.config import Config
from indexd.findings import findings_of

OFFSETS = st.integers(min_value=0, max_value=2**63 - 1)


@given(
    st.dictionaries(
        st.sampled_from(["commitLogMinOffset", "durableOffset", "readOffset", "commitLogMaxOffset"]), OFFSETS
    ),
    OFFSETS,
    st.lists(st.tuples(OFFSETS, OFFSETS, st.text()), max_size=3),
)
def test_any_row_can_be_drawn(row: dict[str, Any], built: int, gaps: list[tuple[int, int, str]]) -> None:
    row = row | {"phyOffset": built, "uncovered": gaps, "phase": "running"}
    look = Look(row, "here\x1b[2J", 0.0, findings=["\x1b[31m" + why for _, _, why in gaps])
    lines = list(draw(look, {}))
    assert sum(line.startswith("! ") for line in lines) == len(gaps)
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, []),
        ({"problems": {}, "corrupt": None, "uncovered": [], "stalled": {}, "broker": {"unsafe": []}}, []),
        (
            {"problems": {"build": "cannot write /d: full; free space"}},
            ["build waits: cannot write /d: full; free space"],
        ),
        ({"stalled": {"drain": 63.4}}, ["drain has not moved for 63 s"]),
        ({"corrupt": {"offset": 7, "reason": "bad magic"}}, ["bytes that are no frame, at 7: bad magic"]),
        ({"uncovered": [[0, 10, "expired"]], "commitLogMinOffset": 10}, []),
        (
            {"uncovered": [[0, 10, "expired"], [5, 30, "corrupt"], [40, 41, "a"]], "commitLogMinOffset": 10},
            ["21 bytes of the log are not covered: a, corrupt"],
        ),
        ({"broker": {"alive": False, "unsafe": ["it indexes"]}}, ["it indexes"]),
        ({"rowProblem": "KeyError('x')"}, ["KeyError"]),
    ],
)
def test_what_needs_an_operator(row: dict[str, Any], expected: list[str]) -> None:
    found = findings_of(row)
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True))


def look_at(seconds: float, **figures: int) -> Look:
    return Look({"phase": "running", "pid": 1, **figures}, "", seconds)


def test_rates_are_those_of_the_last_seconds() -> None:
    looks: deque[Look] = deque()

    def rate(seconds: float, **figures: int) -> dict[str, float]:
        looks.append(look_at(seconds, **figures))
        return rates(looks)

    assert rate(100, readMessages=10) == {}
    assert rate(100, readMessages=10) == {}, "no time has passed"
    assert rate(102, readMessages=20, readOffset=5) == {"readMessagesPerSecond": 5.0}
    assert rate(110, readMessages=20) == {"readMessagesPerSecond": 1.0}
    assert rate(118, readMessages=20) == {"readMessagesPerSecond": 0.0}
    assert rate(218, readMessages=1020) == {"readMessagesPerSecond": 10.0}, "two looks are enough, however far apart"
    assert len(looks) == 2


def test_what_is_indexed_is_known_after_two_drains() -> None:
    looks: deque[Look] = deque()
    seen = []
    # 1000 bytes a second, drained every 3 s, looked at every second.
    for second in range(31):
        drains = (second + 2) // 3
        looks.append(look_at(second, drains=drains, phyOffset=drains * 3000, commitLogMaxOffset=9_000 + second * 1000))
        seen.append(rates(looks).get("indexedBytesPerSecond"))
    assert seen[:4] == [None] * 4, "nothing, or a whole drain's: neither is a rate"
    assert all(rate is not None and 700 <= rate <= 1500 for rate in seen[4:])


def test_texts_of_digits_are_numbers_again_but_names_are_not() -> None:
    answer = {
        "phyOffset": "9223372036854775807", "uncovered": [["0", "12", "no. 7"]], "pid": 7, "cluster": "2024",
        "newest": [{"name": "20261121132749727", "endPhyOffset": "-1"}], "names": ["20261121132749727"],
        "broker": {"maxOffset": "5", "alive": None, "why": "3"}, "diskUsedRatio": 0.5, "caughtUp": True, "version": "1",
    }  # fmt: skip
    assert from_text64(answer) == {
        **answer,
        "phyOffset": 2**63 - 1,
        "uncovered": [[0, 12, "no. 7"]],
        "newest": [{"name": "20261121132749727", "endPhyOffset": -1}],
        "broker": {"maxOffset": 5, "alive": None, "why": "3"},
    }


def test_they_are_the_numbers_that_the_daemon_has(tmp_path) -> None:
    from indexd.serve.board import Board
    from indexd.serve.http.answers import text64

    config = Config(store={"store": tmp_path, "data": tmp_path}, node={"cluster": "5", "node_id": "6"})
    board = Board(config)
    board.recovering("replay", 1, 4)
    row = board.row() | {"phyOffset": 2**63 - 1, "uncovered": [[1, 2**60, "why"]]}
    there_and_back = from_text64(json.loads(json.dumps(text64(row))))
    assert there_and_back == json.loads(json.dumps(row))


def test_recovery_in_words() -> None:
    for step, text in (
        ({"step": "replay", "unit": "files", "done": 1, "total": 4}, "recovery  25%  replay: 1 of 4 files"),
        ({"step": "compare", "done": 0, "total": 0}, "recovery  0%  compare: 0 B of 0 B"),
    ):
        assert text in list(draw(Look({"phase": "recovering", "recovering": step}, "here"), {}))


def test_one_that_does_not_answer_is_not_said_to_run() -> None:
    row = {"phase": "unreachable", "lastPhase": "running", "dispatchBehindBytes": 0, "caughtUp": True, "phyOffset": 1}
    drawn = list(draw(Look(row, "/d/state", 100.0, age=45.0), {}))
    assert drawn[0] == "does not answer (figures are 45 s old)"
    assert "written 45 s ago, when it was running" in drawn[1]
    assert any("caught up then" in line for line in drawn)
