"""Both answers to a query, on the stores that RocketMQ's own code wrote: its answers, and the exact ones."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from indexd.query import TIME_MAX, KeyQuery, QueryIndex, open_index, query_exact, query_rocketmq
from indexd.storage.disk import Disk
from support.data_directory import config_of, make_golden_data
from support.goldens import GOLDENS, Golden, unpack
from support.naive import NaiveIndexService, exact_oracle, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL = 10_000


@dataclass(frozen=True)
class Built:
    """A golden, the index that was built from its log, and the rows that its own code read."""

    golden: Golden
    index: QueryIndex
    naive: NaiveIndexService
    rows: list[dict[str, Any]]

    def exact(self, query: KeyQuery) -> list[int]:
        answer = query_exact(self.index, query)
        assert [hit.store_timestamp for hit in answer.hits] == [self.times[hit.phy_offset] for hit in answer.hits]
        assert (answer.why is None) == (bool(answer.hits) or answer.truncated is not None)
        return [hit.phy_offset for hit in answer.hits]

    @cached_property
    def times(self) -> dict[int, int]:
        return {row["phyOffset"]: row["storeTimestamp"] for row in self.rows}


@pytest.fixture(scope="module", params=GOLDENS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    directory = tmp_path_factory.mktemp("answers")
    golden = unpack(request.param, directory)
    data = directory / "data"
    _, naive = make_golden_data(data, golden)
    index = open_index(Disk(), config_of(data))
    yield Built(golden, index, naive, golden.messages())
    index.close()


def every_key(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str | None], list[dict[str, Any]]]:
    """(topic, key, index type) of every name that a message has -> the rows that can answer it."""
    found = defaultdict(list)
    for row in rows:
        names = {(piece, kind) for piece in split_keys(row["keys"]) for kind in (None, "K")}
        if row["uniqKey"] is not None:
            names |= {(row["uniqKey"], None), (row["uniqKey"], "U")}
        if row["tags"]:
            names.add((row["tags"], "T"))
        for key, kind in names:
            found[row["topic"], key, kind].append(row)
    return found


def test_rocketmq_mode_gives_every_golden_answer(built: Built) -> None:
    for row in built.golden.answers():
        query = KeyQuery(row["topic"], row["key"], row["max"], row["begin"], row["end"], row.get("indexType"))
        answer = query_rocketmq(built.index, query)
        found = answer.to_json()
        for name in ("phyOffsets", "indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"):
            assert found[name] == row[name], query


def test_rocketmq_mode_is_the_naive_service_on_derived_queries(built: Built) -> None:
    for query in derived(built, 300):
        found, timestamp, phy_offset = built.naive.query_offset(
            query.topic, query.key, min(query.max_num, 64), query.begin, query.end, query.index_type
        )
        answer = query_rocketmq(built.index, query)
        assert [hit.phy_offset for hit in answer.hits] == found, query
        assert answer.last_update is not None
        assert (answer.last_update.timestamp, answer.last_update.phy_offset) == (timestamp, phy_offset)


def test_exact_mode_answers_the_golden_queries_as_the_messages_do(built: Built) -> None:
    missed_by_rocketmq = 0
    for row in built.golden.answers():
        asked = (row["topic"], row["key"])
        times, kind = (row["begin"], row["end"]), row.get("indexType")
        expected = sorted(exact_oracle(built.rows, *asked, *times, kind, built.golden.flavour), reverse=True)
        assert built.exact(KeyQuery(*asked, ALL, *times, kind)) == expected
        assert built.exact(KeyQuery(*asked, row["max"], *times, kind)) == expected[: row["max"]]
        missed_by_rocketmq += len(set(expected[: row["max"]]) - set(row["phyOffsets"]))
    assert missed_by_rocketmq > 0 or not built.golden.answers()


def test_exact_mode_finds_every_key_of_every_message(built: Built) -> None:
    """Of one golden; of the others every third."""
    times, step = built.times, 1 if built.golden.name == "rocketmq-5.4-killed-open-index" else 3
    for (topic, key, kind), rows in list(every_key(built.rows).items())[::step]:
        expected = sorted(exact_oracle(rows, topic, key, 0, TIME_MAX, kind, built.golden.flavour), reverse=True)
        answer = query_exact(built.index, KeyQuery(topic, key, ALL, index_type=kind))
        assert [hit.phy_offset for hit in answer.hits] == expected, (topic, key, kind)
        assert [hit.store_timestamp for hit in answer.hits] == [times[offset] for offset in expected]
        assert answer.truncated is None


def test_exact_mode_answers_derived_queries_as_the_messages_do(built: Built) -> None:
    for query in derived(built, 200):
        expected = sorted(
            exact_oracle(built.rows, query.topic, query.key, query.begin, query.end, query.index_type,
                         built.golden.flavour),
            reverse=True,
        )  # fmt: skip
        assert built.exact(query) == expected[: query.max_num], query


def test_a_golden_is_covered_whole(built: Built) -> None:
    coverage = query_exact(built.index, KeyQuery("no such topic", "no such key")).coverage
    assert coverage.complete
    assert coverage.log_begin == coverage.begin == 0


def derived(built: Built, count: int) -> list[KeyQuery]:
    """Queries whose times are exact store times and what lies just beside them; some keys are there, but elsewhere."""
    rng = random.Random(built.golden.name)
    names = sorted(every_key(built.rows), key=repr)
    by_name = every_key(built.rows)
    topics = sorted({topic for topic, _, _ in names})
    queries = []
    for _ in range(count):
        topic, key, kind = rng.choice(names)
        row = rng.choice(by_name[topic, key, kind])
        time = row["storeTimestamp"]
        begin, end = rng.choice(
            [(time, time), (time, TIME_MAX), (0, time), (time + 1, TIME_MAX), (0, time - 1), (time - 1, time + 1),
             (time - 500, time + 500), (time - 2000, time), (time + 1, time - 1), (-5, -1)]
        )  # fmt: skip
        if rng.random() < 0.1:
            topic = rng.choice(topics)
        if rng.random() < 0.1:
            kind = rng.choice([None, "K", "U", "T"])
        queries.append(KeyQuery(topic, key, rng.choice([0, 1, 2, 64, 200, ALL]), begin, end, kind))
    return queries
