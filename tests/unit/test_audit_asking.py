"""Sampled queries on whole stores: what the broker's answers miss and add, as told by naive code."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from indexd.audit.samples.answers import WIDTHS, Answers
from indexd.audit.samples.asking import range_around
from indexd.audit.samples.broker_query import TIME_MAX
from indexd.audit.samples.kernel import ROWS_MAX
from indexd.config import Config
from support.auditing import config_for, config_of_golden, index_log
from support.goldens import GOLDENS, unpack
from support.naive import exact_oracle, key_hash
from support.sampling import (
    LAYOUT,
    asked,
    copy_of,
    naive_service,
    planned,
    rows_of_log,
    shares_of,
)
from support.small_log import SEGMENT_SIZE, write_log

LARGE = 1 << 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Several segments and files; not to be changed."""
    store = tmp_path_factory.mktemp("small") / "store"
    write_log(store, 4000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config)
    return config


def by_hand(config: Config, flavour: str, count: int) -> dict[str, Counter[str]]:
    """Per width: what the naive service answers, and what an exact query must find."""
    _, samples = planned(config, count)
    rows = rows_of_log(config)
    naive, unbounded = naive_service(config, flavour), naive_service(config, flavour, LARGE)
    found: dict[str, Counter[str]] = {width: Counter() for width in WIDTHS}
    by_hash = defaultdict(list)
    for row in rows:
        for hashed in hashes_of(row, flavour):
            by_hash[hashed].append(row)
    for sample in samples:
        asked_for = (sample.topic, sample.key)
        everywhere = set(unbounded.query_offset(*asked_for, LARGE, 0, TIME_MAX, sample.index_type)[0])
        # Every message of that hash is written down, whichever key it has.
        same = by_hash[sample.key_hash]
        if len(same) > ROWS_MAX:
            found["all time"]["hot"] += 1
            continue
        for width, length in WIDTHS.items():
            begin, end = range_around(sample.store_timestamp, length)
            answer, _, _ = naive.query_offset(*asked_for, 64, begin, end, sample.index_type)
            true = exact_oracle(same, *asked_for, begin, end, sample.index_type, flavour)
            unlimited = set(unbounded.query_offset(*asked_for, LARGE, begin, end, sample.index_type)[0])
            missed = true - set(answer)
            found[width] += Counter(
                queries=1,
                hits=len(true),
                answers=len(answer),
                hole=len(missed - everywhere),
                cut_off=len(missed & unlimited),
                late=len((missed & everywhere) - unlimited),
                repeated=len(answer) - len(set(answer)),
                added=len(answer) - len(true & set(answer)),
                wrong_queries=int(bool(missed - unlimited) or len(answer) > len(true & set(answer))),
            )
    return found


def hashes_of(row: dict[str, object], flavour: str) -> set[int]:
    texts = [f"{row['topic']}#{piece}" for piece in [*str(row["keys"] or "").split(" "), row["uniqKey"] or ""] if piece]
    if flavour == "5.4" and row["tags"]:
        texts.append(f"{row['topic']}#T#{row['tags']}")
    return {key_hash(text) for text in texts}


def check_by_hand(config: Config, flavour: str, count: int = 80) -> Answers:
    answers, expected = asked(config, count), by_hand(config, flavour, count)
    assert answers.hot == expected["all time"].pop("hot", 0)
    assert (answers.long, answers.unseen, answers.late) == (0, 0, 0)
    for width, share in shares_of(answers).items():
        found = Counter(
            {
                "queries": share.queries,
                "hits": share.hits,
                "answers": share.answers,
                "hole": share.hole,
                "cut_off": share.cut_off,
                "late": share.time + share.early_end,
                "repeated": share.repeated,
                "added": share.added,
                "wrong_queries": share.wrong_queries,
            }
        )
        assert +found == +expected[width], width
    return answers


@pytest.mark.parametrize("name", GOLDENS)
def test_answers_of_what_rocketmq_wrote_are_judged_as_by_hand(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    shares = shares_of(check_by_hand(config_of_golden(golden), golden.flavour))
    assert shares["all time"].missed == shares["all time"].hole == 0
    # A millisecond is asked for, and whole seconds are what it is held against.
    assert shares["millisecond"].time > 0.5 * shares["millisecond"].hits


def test_a_sound_store_with_a_clock_that_was_set_back(small: Config) -> None:
    shares = shares_of(check_by_hand(small, "5.4"))
    assert shares["all time"].missed == 0
    assert all(share.hole == share.dead == 0 for share in shares.values())


def test_what_stands_in_a_hole_is_missed_by_a_hole(small: Config, tmp_path: Path) -> None:
    store, config = copy_of(small, tmp_path)
    sorted((store / "index").iterdir())[1].unlink()
    shares = shares_of(check_by_hand(config, "5.4"))
    assert 0 < shares["all time"].hole == shares["all time"].missed
    assert shares["day"].hole > 0


def test_what_is_indexed_twice_is_answered_twice(small: Config, tmp_path: Path) -> None:
    _, config = copy_of(small, tmp_path)
    begin = sorted(row["phyOffset"] for row in rows_of_log(config))[-1000]
    index_log(config, begin=begin, name=20270101000000000)
    shares = shares_of(check_by_hand(config, "5.4"))
    assert shares["all time"].repeated > 10
    assert shares["all time"].hole == 0


def test_answers_that_lead_to_expired_log_are_dead(small: Config, tmp_path: Path) -> None:
    store, config = copy_of(small, tmp_path)
    for segment in sorted((store / "commitlog").iterdir())[:1]:
        segment.unlink()
    shares = shares_of(check_by_hand(config, "5.4"))
    assert shares["all time"].dead > 0
    assert shares["all time"].missed == 0


def test_however_the_log_is_cut_the_answers_are_the_same(small: Config) -> None:
    offsets = [row["phyOffset"] for row in rows_of_log(small)]
    assert asked(small, 50) == asked(small, 50, cuts=offsets[7::900])
