"""What a broker's answers miss and add, each cause by itself; what changes meanwhile; what is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from indexd.audit import audit_task
from indexd.audit.samples.answers import Answers, Share
from indexd.audit.samples.asking import ask
from indexd.audit.samples.kernel import ROWS_MAX
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.sampling import (
    LAYOUT,
    asked,
    copy_of,
    planned,
    shares_of,
    store_of,
)
from support.small_log import SEGMENT_SIZE, write_log


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Several segments and files; not to be changed."""
    store = tmp_path_factory.mktemp("small") / "store"
    write_log(store, 4000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config)
    return config


# Each cause by itself.


def test_missed_by_whole_seconds(tmp_path: Path) -> None:
    shares = shares_of(asked(store_of(tmp_path, [(0, "a"), (1999, "b"), (9000, "c")])))
    assert (shares["millisecond"].hits, shares["millisecond"].time) == (3, 1)
    assert (shares["second"].hits, shares["second"].time) == (3, 1)  # told to be a second that ends before the range
    assert shares["minute"].missed == 0


def test_missed_because_the_search_ends_early(tmp_path: Path) -> None:
    # The clock was set back, and the newest entry of the key is too old for the range.
    config = store_of(tmp_path, [(0, "z"), (100_000, "k"), (10_000, "k"), (200_000, "other")], IndexLayout(5000, 2000))
    shares = shares_of(asked(config))
    assert (shares["millisecond"].early_end, shares["second"].early_end) == (1, 1)
    assert (shares["hour"].missed, shares["all time"].missed) == (0, 0)


def test_missed_because_an_older_file_is_not_asked(tmp_path: Path) -> None:
    # A newer file that begins before the range ends the search.
    messages = [(0, "p"), (50_000, "k"), (60_000, "q"), (1000, "r"), (2000, "s"), (3000, "t")]
    shares = shares_of(asked(store_of(tmp_path, messages, IndexLayout(5000, 4))))
    assert shares["second"].early_end == 1 + 1  # q's range lies in the first file, too
    assert shares["all time"].missed == 0


def test_more_than_a_query_gives_are_cut_off(tmp_path: Path) -> None:
    config = store_of(tmp_path, [(10 * number, "k") for number in range(100)])
    answers = asked(config)
    shares = shares_of(answers)
    assert (shares["all time"].hits, shares["all time"].answers, shares["all time"].cut_off) == (100, 64, 36)
    assert (shares["all time"].missed, shares["all time"].wrong_queries) == (0, 0)
    assert "36 hits more are cut off, for 64 are the most it gives" in "\n".join(answers.lines())


def test_other_keys_and_what_lies_out_of_the_range_are_added(tmp_path: Path) -> None:
    shares = shares_of(asked(store_of(tmp_path, [(0, "Aa"), (1000, "BB"), (500_000, "far"), (500_700, "far")])))
    # Aa and BB have one hash.
    assert (shares["all time"].other_key, shares["all time"].hits) == (2, 4)
    assert shares["second"].out_of_range == 1
    assert shares["all time"].out_of_range == 0


def test_a_key_with_very_many_messages_is_not_asked_for(tmp_path: Path) -> None:
    config = store_of(tmp_path, [(number, f"hot k{number}") for number in range(ROWS_MAX + 1)])
    answers = asked(config, 30)
    assert (answers.hot, answers.asked, answers.drawn) == (1, 29, 30)
    assert "1 with too many messages" in answers.lines()[-1]


# What changes meanwhile.


def test_what_expires_meanwhile_does_not_count(small: Config, tmp_path: Path) -> None:
    store, config = copy_of(small, tmp_path)
    plan, samples = planned(config, 200)
    parts = [audit_task(task, Disk(), config) for task in plan.tasks]
    before = ask(Disk(), config, plan, samples, parts)
    for segment in sorted((store / "commitlog").iterdir())[:2]:
        segment.unlink()
    min((store / "index").iterdir()).unlink()
    found = ask(Disk(), config, plan, samples, parts)
    assert found.unseen > 0
    assert found.asked + found.unseen == before.asked
    assert all(share.hole == share.dead == 0 for share in found.shares)


def test_what_is_written_and_indexed_meanwhile_does_not_count(tmp_path: Path) -> None:
    # Aa and BB have one hash, and so will be answered.
    messages = [(1000 * number, f"a{number % 7} b{number}") for number in range(60)] + [(60_000, "Aa")]
    config = store_of(tmp_path, messages)
    plan, samples = planned(config, 200)
    parts = [audit_task(task, Disk(), config) for task in plan.tasks]
    before = ask(Disk(), config, plan, samples, parts)
    later = tmp_path / "later"
    config = store_of(later, messages + [(60_000 + number, f"a{number % 7} BB") for number in range(30)])
    shutil.rmtree(tmp_path / "store")
    (later / "store").rename(tmp_path / "store")
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE)
    assert ask(Disk(), config, plan, samples, parts) == before


def test_a_folder_that_is_gone_is_an_index_without_files(tmp_path: Path) -> None:
    config = store_of(tmp_path, [(0, "a"), (1000, "b")])
    plan, samples = planned(config, 10)
    parts = [audit_task(task, Disk(), config) for task in plan.tasks]
    shutil.rmtree(tmp_path / "store" / "index")
    found = ask(Disk(), config, plan, samples, parts)
    assert all(share.hole == share.hits for share in found.shares)


# Bounds.


def test_what_has_no_time_left_is_counted(small: Config) -> None:
    plan, samples = planned(small, 20)
    found = ask(Disk(), small, plan, samples, [], seconds_max=-1)
    assert (found.late, found.asked, found.queries) == (20, 0, 0)
    assert found.lines() == ["Queries: no key of the log could be asked for (20 for want of time)."]


# What is said.


def test_what_is_said() -> None:
    answers = Answers(
        (
            Share("second", queries=2, hits=200, time=100, answers=100),
            Share("minute", queries=2, wrong_queries=1, hits=3000, hole=300, time=1, answers=2703, repeated=3, dead=1),
            Share("all time", queries=2, hits=4000, answers=100, cut_off=3900),
        ),
        drawn=3,
        asked=2,
        hot=1,
    )
    first, second, third = answers.lines()
    assert first == (
        "In time ranges of a minute the broker's own query misses 10.0 % of 3,000 true hits (10.0 % not findable at "
        "all, under 0.1 % by its test of times, which counts whole seconds); 0.1 % of its 2,703 answers are wrong "
        "(3 repeated, 1 without a message)."
    )
    assert second == (
        "In other ranges it misses: a second 50.0 %, all time 0 %; 3,900 hits more are cut off, for 64 are the most "
        "it gives."
    )
    assert third == "Asked: 2 keys from all over the log; left out: 1 with too many messages."
    rows = answers.rows()
    assert [row["kind"] for row in rows] == ["answers", "answers", "answers", "samples"]
    assert rows[1] == {
        "kind": "answers",
        "width": "minute",
        "rangeMs": 60_000,
        "queries": 2,
        "wrongQueries": 1,
        "trueHits": 3000,
        "missed": 301,
        "missedShare": 0.100333,
        "missedByHole": 300,
        "missedByTime": 1,
        "missedByEarlyEnd": 0,
        "cutOff": 0,
        "answers": 2703,
        "added": 4,
        "addedShare": 0.00148,
        "addedOfOtherKey": 0,
        "addedOutOfRange": 0,
        "addedRepeated": 3,
        "addedDead": 1,
    }
    assert Answers().lines() == ["Queries: no key of the log could be asked for."]
