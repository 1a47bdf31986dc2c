"""ConsumeQueues of the stores that RocketMQ's own code wrote: byte for byte, and each of its answers by store time."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.consumequeue.check import check_queues
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.frontier import write_frontier
from indexd.output import CheckScope, Condition
from indexd.query import open_data
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.data_directory import make_golden_data
from support.goldens import GOLDENS, Golden, unpack
from support.queues import batches_of, tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from indexd.query import Data

INTERVAL = 4096


def cq_times(golden: Golden) -> list[dict[str, Any]]:
    """200 rows of topic, queueId, timestamp, and the offsets lower and upper."""
    text = (golden.root / "cqtime.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.fixture(scope="module", params=GOLDENS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Golden, Data]]:
    """A golden and a data directory that our own builders filled from its log."""
    directory = tmp_path_factory.mktemp("cqtime")
    golden = unpack(request.param, directory)
    data = directory / "data"
    frontier, _ = make_golden_data(data, golden)
    files, disk = DataFiles(data), Disk()
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
    with open_data(data) as opened:
        yield golden, opened
    queues.close()
    sparse.close()


# A killed store's tree is whole, too: its broker had dispatched all it had stored, and what is written to a mapped
# file outlives the process.
def test_gives_every_queue_file_byte_for_byte(built: tuple[Golden, Data], tmp_path: Path) -> None:
    golden, data = built
    theirs = tree(golden.root / "consumequeue")
    assert tree(data.index.files.consumequeue) == theirs
    held = data.index.look().frontier.outputs["consumeQueue"]
    assert len(held.queues) == len({path.rpartition("/")[0] for path in theirs})
    scope = CheckScope(Condition.AT_REST, True, lambda _: None)
    assert check_queues(Disk(), golden.root / "consumequeue", held, scope).kept == []


def test_our_own_queues_give_the_brokers_answers(built: tuple[Golden, Data]) -> None:
    golden, data = built
    times = {row["phyOffset"]: row["storeTimestamp"] for row in golden.messages()}
    for row in cq_times(golden):
        for boundary in ("lower", "upper"):
            answer = data.at_time(row["topic"], row["queueId"], row["timestamp"], boundary)
            assert answer.queue_offset == row[boundary], row
            if answer.phy_offset is not None:
                assert answer.store_timestamp == times[answer.phy_offset]


def test_every_message_is_found_in_its_queue(built: tuple[Golden, Data]) -> None:
    golden, data = built
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in golden.messages():
        if row["sysFlag"] & 0xC in (0, 0x8):
            queues[row["topic"], row["queueId"]].append(row["phyOffset"])
    for (topic, queue_id), offsets in queues.items():
        answer = data.by_queue(topic, queue_id, max_num=10_000)
        assert [hit.unit.phy_offset for hit in answer.hits] == offsets
        assert answer.problems == 0
        assert not answer.truncated


def test_the_first_message_of_each_time(built: tuple[Golden, Data]) -> None:
    golden, data = built
    rows = golden.messages()
    asked = sorted({row["storeTimestamp"] + step for row in rows for step in (0, 1)})[::7]
    for timestamp in asked:
        wanted = next((row["phyOffset"] for row in rows if row["storeTimestamp"] >= timestamp), None)
        answer = data.log_at_time(timestamp)
        assert answer.phy_offset == wanted
        assert answer.scanned <= INTERVAL // 91 + 2
