"""The stores that RocketMQ's own code wrote: its files byte for byte, its answers and the exact ones, its log again."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.consumequeue.check import check_queues
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.demo import DemoWriter
from indexd.flush.frontier import write_frontier
from indexd.query import TIME_MAX, Data, KeyQuery, open_data, query_exact, query_rocketmq
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.data_directory import make_golden_data
from support.goldens import GOLDENS, Golden, unpack
from support.naive import NaiveIndexService, exact_oracle, naive_frames, split_keys
from support.queues import batches_of, scope_of, tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = 10_000
INTERVAL = 4096
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Built:
    """A golden, a data directory that our own builders filled from its log, and the rows that its own code read."""

    golden: Golden
    data: Data
    naive: NaiveIndexService
    rows: Rows
    times: dict[int, int]

    def exact(self, query: KeyQuery) -> list[int]:
        answer = query_exact(self.data.index, query)
        assert [hit.store_timestamp for hit in answer.hits] == [self.times[hit.phy_offset] for hit in answer.hits]
        assert (answer.why is None) == (bool(answer.hits) or answer.truncated is not None)
        assert answer.truncated is None or len(answer.hits) == query.max_num
        return [hit.phy_offset for hit in answer.hits]

    def wanted(self, query: KeyQuery, rows: Rows | None = None) -> list[int]:
        asked = query.topic, query.key, query.begin, query.end, query.index_type, self.golden.flavour
        return sorted(exact_oracle(self.rows if rows is None else rows, *asked), reverse=True)


@pytest.fixture(scope="module", params=GOLDENS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    directory = tmp_path_factory.mktemp("goldens")
    golden = unpack(request.param, directory)
    frontier, naive = make_golden_data(directory / "data", golden)
    files, disk = DataFiles(directory / "data"), Disk()
    disk.make_dir(files.consumequeue)
    disk.make_dir(files.sparse)
    queues = ConsumeQueueStore(disk, files.consumequeue, golden.queue_file_size, 1000)
    sparse = SparseService(disk, files.sparse, golden.segment_size, INTERVAL)
    for batch in batches_of(golden.root / "commitlog", golden.segment_size, rows_max=700):
        queues.build(batch)
        sparse.build(batch)
    held = {output.name: output.mark().held for output in (queues, sparse)}
    frontier = replace(frontier.with_outputs(**held), refill_offset=frontier.phy_offset)
    write_frontier(disk, files.frontier, frontier, "0")
    rows = golden.messages()
    with open_data(directory / "data") as data:
        yield Built(golden, data, naive, rows, {row["phyOffset"]: row["storeTimestamp"] for row in rows})


# --- keys ---


def test_the_naive_service_writes_the_brokers_files(built: Built) -> None:
    golden = built.golden
    assert [message.row() for message in naive_frames(golden.root / "commitlog", golden.segment_size)] == built.rows
    assert [file.to_bytes() for file in built.naive.files] == [file.read_bytes() for file in golden.index_files()]
    # The checkpoint holds the end of the last full file.
    (stored,) = struct.unpack_from(">q", (golden.root / "checkpoint").read_bytes(), 16)
    assert built.naive.index_msg_timestamp == stored


def test_every_golden_answer_as_the_broker_gives_it_and_exact(built: Built) -> None:
    missed_by_rocketmq = 0
    for row in built.golden.answers():
        query = KeyQuery(row["topic"], row["key"], row["max"], row["begin"], row["end"], row.get("indexType"))
        asked = query.topic, query.key, min(query.max_num, 64), query.begin, query.end, query.index_type
        names = ("phyOffsets", "indexLastUpdateTimestamp", "indexLastUpdatePhyoffset")
        found = query_rocketmq(built.data.index, query).to_dict()
        assert [found[name] for name in names] == [row[name] for name in names], query
        assert list(built.naive.query_offset(*asked)) == [row[name] for name in names], query
        expected = built.wanted(query)
        assert built.exact(query) == expected[: row["max"]]
        assert built.exact(KeyQuery(query.topic, query.key, ALL, *asked[3:])) == expected
        missed_by_rocketmq += len(set(expected[: row["max"]]) - set(row["phyOffsets"]))
    assert missed_by_rocketmq > 0 or not built.golden.answers()


def every_key(rows: Rows) -> dict[tuple[str, str, str | None], Rows]:
    """(topic, key, index type) of every name that a message has -> the rows that can answer it."""
    found = defaultdict(list)
    for row in rows:
        names = {(piece, kind) for piece in split_keys(row["keys"]) for kind in (None, "K")}
        names |= {(row["uniqKey"], kind) for kind in (None, "U") if row["uniqKey"] is not None}
        names |= {(row["tags"], "T")} if row["tags"] else set()
        for key, kind in names:
            found[row["topic"], key, kind].append(row)
    return found


def test_exact_mode_finds_every_key_of_every_message(built: Built) -> None:
    """Of one golden; of the others every third."""
    step = 1 if built.golden.name == "rocketmq-5.4-killed-open-index" else 3
    for (topic, key, kind), rows in list(every_key(built.rows).items())[::step]:
        query = KeyQuery(topic, key, ALL, index_type=kind)
        assert built.exact(query) == built.wanted(query, rows), query
    coverage = query_exact(built.data.index, KeyQuery("no such topic", "no such key")).coverage
    assert coverage.complete
    assert coverage.log_begin == coverage.begin == 0


def derived(built: Built, count: int) -> Iterator[KeyQuery]:
    """Queries whose times are exact store times and what lies just beside them; some keys are there, but elsewhere."""
    rng, by_name = random.Random(built.golden.name), every_key(built.rows)
    names = sorted(by_name, key=repr)
    topics = sorted({topic for topic, _, _ in names})
    for _ in range(count):
        topic, key, kind = rng.choice(names)
        time = rng.choice(by_name[topic, key, kind])["storeTimestamp"]
        begin, end = rng.choice(
            [(time, time), (time, TIME_MAX), (0, time), (time + 1, TIME_MAX), (0, time - 1), (time - 1, time + 1),
             (time - 500, time + 500), (time - 2000, time), (time + 1, time - 1), (-5, -1)]
        )  # fmt: skip
        topic = rng.choice(topics) if rng.random() < 0.1 else topic
        kind = rng.choice([None, "K", "U", "T"]) if rng.random() < 0.1 else kind
        yield KeyQuery(topic, key, rng.choice([0, 1, 2, 64, 200, ALL]), begin, end, kind)


def test_derived_queries_are_answered_as_by_the_naive_service_and_as_the_messages_do(built: Built) -> None:
    for query in derived(built, 300):
        asked = query.topic, query.key, min(query.max_num, 64), query.begin, query.end, query.index_type
        answer = query_rocketmq(built.data.index, query)
        assert answer.last_update is not None
        last_update = answer.last_update.timestamp, answer.last_update.phy_offset
        found = [hit.phy_offset for hit in answer.hits]
        assert (found, *last_update) == built.naive.query_offset(*asked), query
        assert built.exact(query) == built.wanted(query)[: query.max_num], query


# --- queues and times ---


# A killed store's tree is whole, too: its broker had dispatched all it had stored, and what is written to a mapped
# file outlives the process.
def test_gives_every_queue_file_byte_for_byte(built: Built) -> None:
    theirs = tree(built.golden.root / "consumequeue")
    assert tree(built.data.index.files.consumequeue) == theirs
    held = built.data.index.look().frontier.outputs["consumeQueue"]
    assert len(held.queues) == len({path.rpartition("/")[0] for path in theirs})
    assert check_queues(Disk(), built.golden.root / "consumequeue", held, scope_of()).kept == []


def test_our_own_queues_give_the_brokers_answers(built: Built) -> None:
    for line in (built.golden.root / "cqtime.jsonl").read_text("utf-8").strip().split("\n"):
        row = json.loads(line)
        for boundary in ("lower", "upper"):
            answer = built.data.at_time(row["topic"], row["queueId"], row["timestamp"], boundary)
            assert answer.queue_offset == row[boundary], row
            assert answer.phy_offset is None or answer.store_timestamp == built.times[answer.phy_offset]


def test_every_message_is_found_in_its_queue_and_by_its_time(built: Built) -> None:
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in built.rows:
        if row["sysFlag"] & 0xC in (0, 0x8):
            queues[row["topic"], row["queueId"]].append(row["phyOffset"])
    for queue, offsets in queues.items():
        found = built.data.by_queue(*queue, max_num=ALL)
        assert [hit.unit.phy_offset for hit in found.hits] == offsets
        assert (found.problems, found.truncated) == (0, False)
    for timestamp in sorted({row["storeTimestamp"] + step for row in built.rows for step in (0, 1)})[::7]:
        wanted = next((row["phyOffset"] for row in built.rows if row["storeTimestamp"] >= timestamp), None)
        answer = built.data.log_at_time(timestamp)
        assert answer.phy_offset == wanted
        assert answer.scanned <= INTERVAL // 91 + 2


# --- the writers of logs ---


def test_a_golden_commitlog_written_again_is_the_same_directory(built: Built, tmp_path: Path) -> None:
    golden = built.golden
    names = {field.name for field in fields(FrameSpec)} - {"properties", "queue_offset"}
    writer = CommitLogWriter(tmp_path / "again", golden.segment_size, prop_crc=golden.prop_crc)
    for message in naive_frames(golden.segments(), golden.segment_size):
        spec = FrameSpec(queue_offset=message.cq_offset, **{name: getattr(message, name) for name in names})
        raw = message.raw_properties[:-20] if golden.prop_crc else message.raw_properties
        assert writer.append(spec, raw_properties=raw) == message.phy_offset
    writer.close(clean=not golden.killed)
    assert tree(tmp_path / "again") == tree(golden.root / "commitlog")


def test_what_the_demo_writes_is_a_broker_s_log(tmp_path: Path) -> None:
    writer = DemoWriter(tmp_path, 1 << 22)
    while writer.count < 500:
        time.sleep(0.01)
    writer.stop()
    read = list(naive_frames(tmp_path / "commitlog", 1 << 22))
    assert len(read) == writer.count
    assert read[-1].phy_offset == writer.last[3]
    assert {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()} == {1 << 22}
    queues: dict[str, int] = defaultdict(int)
    for message in read:
        assert message.cq_offset == queues[message.topic]
        queues[message.topic] += 1
