"""ConsumeQueues built from the logs that RocketMQ's own code wrote: its consumequeue trees, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexd.consumequeue.check import check_queues
from indexd.consumequeue.format import QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.output import CheckScope, Condition
from indexd.storage.disk import Disk
from support.goldens import GOLDENS, Golden, unpack
from support.queues import batches_of, tree

QUEUE_FILE_SIZE = 6000
QUEUES_MAX = 1000


@pytest.fixture(params=GOLDENS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return unpack(request.param, tmp_path)


# A killed store's tree is whole, too: its broker had dispatched all it had stored, and what is written to a mapped
# file outlives the process.
@pytest.mark.parametrize("rows_max", [7, 4096])
def test_gives_every_queue_file_byte_for_byte(golden: Golden, tmp_path: Path, rows_max: int) -> None:
    own = tmp_path / "own"
    store = ConsumeQueueStore(Disk(), own, QUEUE_FILE_SIZE, QUEUES_MAX)
    for batch in batches_of(golden.root / "commitlog", golden.segment_size, rows_max=rows_max):
        store.build(batch)
    store.publish()
    theirs = tree(golden.root / "consumequeue")
    assert tree(own) == theirs
    entering = [row for row in golden.messages() if row["sysFlag"] & 0xC in (0, 0x8)]
    assert store.counters["units"] == len(entering)
    assert store.counters["repeats"] == store.counters["gaps"] == 0
    marks = store.mark().held.queues
    assert len(marks) == len({path.rpartition("/")[0] for path in theirs})
    store.close()
    scope = CheckScope(Condition.AT_REST, True, lambda _: None)
    found = check_queues(Disk(), golden.root / "consumequeue", QueuesMark(QUEUE_FILE_SIZE, marks), scope)
    assert found.kept == []
