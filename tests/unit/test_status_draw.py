"""status: what is a finding, how rates and strips are made, and what HTTP's texts are turned back into."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.cli import status_draw as words
from indexd.cli.status_ask import Look, Rates, from_text64
from indexd.cli.status_draw import Drawing
from indexd.config import Config
from indexd.findings import findings_of

L, N, R, I, D = words.LEFT_OUT, words.NOT_READ, words.READ, words.INDEXED, words.DURABLE  # noqa: E741 - as drawn
DRAWN = {"phyOffset": 60, "durableOffset": 40, "readOffset": 80, "commitLogMaxOffset": 100}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (DRAWN, [D] * 4 + [I] * 2 + [R] * 2 + [N] * 2),
        (DRAWN | {"commitLogMinOffset": 40}, [I] * 3 + [R] * 3 + [N] * 4),
        (DRAWN | {"beginOffset": 20}, [L] * 2 + [D] * 2 + [I] * 2 + [R] * 2 + [N] * 2),
        (DRAWN | {"uncovered": [[5, 6, "corrupt"], [55, 65, "x"]]}, [L] + [D] * 3 + [I, L, L, R, N, N]),
        (DRAWN | {"durableOffset": 41}, [D] * 4 + [I] * 2 + [R] * 2 + [N] * 2),
        ({"phyOffset": 0}, [N] * 10),
        ({"phyOffset": 5, "durableOffset": 5}, [D] * 10),
    ],
)
def test_the_log_as_a_strip(row: dict[str, Any], expected: list[int]) -> None:
    assert words.strip(row, 10) == expected


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
    assert len(words.strip(row, 60)) == 60
    out = io.StringIO()
    look = Look(row, "here\x1b[2J", 0.0, findings=["\x1b[31m" + why for _, _, why in gaps])
    assert Drawing(out).show(iter([(look, {})]), is_watching=False) == bool(gaps)
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
    assert max(map(len, out.getvalue().split("\n"))) <= 100


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
            ["21 bytes of the log are not indexed: a, corrupt"],
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
    rates = Rates()
    assert rates.now() == {}
    rates.add(look_at(100, readMessages=10))
    assert rates.now() == {}
    rates.add(look_at(100, readMessages=10))
    assert rates.now() == {}, "the same figures again are no second look"
    rates.add(look_at(102, readMessages=20, readOffset=5))
    assert rates.now() == {"readMessagesPerSecond": 5.0}
    rates.add(look_at(110, readMessages=20))
    assert rates.now() == {"readMessagesPerSecond": 1.0}
    rates.add(look_at(111, readMessages=20))
    assert rates.now() == {"readMessagesPerSecond": 0.9}, "the window is never shorter than ten seconds"
    rates.add(look_at(118, readMessages=20))
    rates.add(look_at(126, readMessages=20))
    assert rates.now() == {"readMessagesPerSecond": 0.0}
    rates.add(look_at(226, readMessages=1020))
    assert rates.now() == {"readMessagesPerSecond": 10.0}, "two looks are enough, however far apart"


def test_what_is_indexed_is_measured_from_drain_to_drain() -> None:
    # 1000 bytes a second, drained every 3 s, looked at every second.
    rates, seen = Rates(), []
    for second in range(31):
        drains = (second + 2) // 3
        rates.add(look_at(second, drains=drains, phyOffset=drains * 3000, commitLogMaxOffset=9_000 + second * 1000))
        seen.append(rates.now().get("indexedBytesPerSecond"))
    assert seen[:4] == [None] * 4, "nothing, or a whole drain's: neither is a rate"
    assert seen[4:] == [1000.0] * 27
    # A drain that does not come makes it less and less.
    for second in range(31, 91):
        rates.add(look_at(second, drains=10, phyOffset=30_000, commitLogMaxOffset=9_000 + second * 1000))
        seen.append(rates.now()["indexedBytesPerSecond"])
    assert seen[31:] == sorted(seen[31:], reverse=True)
    assert seen[-1] < 200


def test_a_log_that_is_indexed_to_its_end_has_a_rate_without_drains() -> None:
    rates = Rates()
    rates.add(look_at(0, drains=5, phyOffset=100, commitLogMaxOffset=100))
    rates.add(look_at(1, drains=5, phyOffset=100, commitLogMaxOffset=100))
    assert rates.now()["indexedBytesPerSecond"] == 0.0
    assert words.rates({"readBytesPerSecond": 0.0}) == "read 0 B/s, indexed not known yet"
    assert words.rates({"indexedBytesPerSecond": 0.0}) == "indexed 0 B/s"
    assert words.rates({}) == "not known yet"


def test_rates_begin_anew_with_another_life() -> None:
    rates = Rates()
    rates.add(look_at(0, drains=0, phyOffset=0))
    rates.add(look_at(1, drains=1, phyOffset=100))
    rates.add(look_at(2, drains=2, phyOffset=50))  # the log was cut
    assert rates.now() == {}
    rates.add(look_at(3, drains=3, phyOffset=60))
    rates.add(look_at(4, drains=4, phyOffset=70))
    assert rates.now() == {"indexedBytesPerSecond": 10.0}
    rates.add(Look({"phase": "running", "pid": 2, "phyOffset": 900}, "", 4))
    assert rates.now() == {}


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


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-1, "0 ms"),
        (0.25, "250 ms"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (7325, "2 h 2 min"),
        (200_000, "2 days 7 h"),
    ],
)
def test_a_time_that_passed(seconds: float, expected: str) -> None:
    assert words.span(seconds) == expected


def test_recovery_in_words() -> None:
    assert words.recovery({"step": "replay", "unit": "files", "done": 1, "total": 4}) == (
        0.25,
        "25%  replay: 1 of 4 files",
    )
    assert words.recovery({"step": "compare", "done": 0, "total": 0}) == (0.0, "0%  compare: 0 B of 0 B")
    assert words.clock(2**80) == str(2**80)


def test_values_are_words() -> None:
    fields = {
        "connected": True,
        "is_new": False,
        "reasons": ["there is no frontier", "x"],
        "none": [],
        "no": None,
        "n": 0,
    }
    assert words.values(fields) == "connected yes, is_new no, reasons there is no frontier; x, n 0"
    assert words.values({"last": {"at": 5, "ok": True}, "pairs": [[1, 2]]}) == "last at 5, ok yes, pairs 1; 2"


def test_one_that_does_not_answer_is_not_said_to_run() -> None:
    row = {"phase": "unreachable", "lastPhase": "running", "dispatchBehindBytes": 0, "caughtUp": True, "phyOffset": 1}
    out = io.StringIO()
    Drawing(out).show(iter([(Look(row, "/d/state", 100.0, age=45.0), {})]), is_watching=False)
    drawn = out.getvalue()
    assert "does not answer (figures are 45.0 s old)\n" in drawn.splitlines(keepends=True)[0]
    assert "written 45.0 s ago, when it was running" in drawn
    assert "caught up then" in drawn


def test_the_broker_in_words() -> None:
    assert words.broker({"alive": True, "pid": 5, "indexing": False, "maxOffset": 9}) == (
        "alive, pid 5, keeps no index itself, its log ends at 9"
    )
    assert words.broker({"alive": False, "indexing": True}) == "not running, keeps an index itself"
    assert words.broker({"alive": None}) == "it is not known whether it is alive"
