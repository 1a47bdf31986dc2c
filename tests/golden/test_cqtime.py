"""Queue offsets by store time on the stores that RocketMQ's own code wrote: each of its answers, both boundaries."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.lookup import LogView
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.frontier import write_frontier
from indexd.query import open_data
from indexd.query.by_time import offset_by_time
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.data_directory import make_golden_data
from support.goldens import GOLDENS, Golden, unpack
from support.queue_goldens import broker_queue, cq_times, queue_file_size
from support.queues import batches_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from indexd.query import Data

INTERVAL = 4096


@pytest.mark.parametrize("name", GOLDENS)
def test_the_brokers_own_queues_give_the_brokers_own_answers(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    rows = cq_times(golden)
    assert len(rows) == 200
    size = queue_file_size(golden)
    with closing(LogView(Disk(), (golden.root / "commitlog",), golden.segment_size, DecoderOptions())) as log:
        for row in rows:
            with broker_queue(golden, row["topic"], row["queueId"], size, log.begin or 0) as queue:
                for boundary in ("lower", "upper"):
                    found = offset_by_time(queue, log.store_timestamp, row["timestamp"], boundary, log.begin or 0)
                    assert found == row[boundary], row


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
    queues = ConsumeQueueStore(disk, files.consumequeue, queue_file_size(golden), 1000)
    sparse = SparseService(disk, files.sparse, golden.segment_size, INTERVAL)
    for batch in batches_of(golden.root / "commitlog", golden.segment_size):
        queues.build(batch)
        sparse.build(batch)
    held = {output.name: output.mark().held for output in (queues, sparse)}
    frontier = replace(frontier.with_outputs(**held), refill_offset=frontier.phy_offset)
    write_frontier(disk, files.frontier, frontier, "0")
    with open_data(data) as opened:
        yield golden, opened
    queues.close()
    sparse.close()


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
