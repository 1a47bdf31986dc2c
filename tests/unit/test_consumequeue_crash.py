"""ConsumeQueues and the loss of power: at every change of the disk, and again while recovering."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from indexd.consumequeue.format import UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.output import OutputMark
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.output_recovery import made_durable, planned_queues
from support.queues import batches, durable_units, sim_tree, stream
from support.sim_disk import SimDisk
from support.sim_fault import SimCrash

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"
FILE_SIZE = 80
EVERYTHING = 1 << 60


def naive(messages: Sequence[NaiveMessage]) -> NaiveConsumeQueueStore:
    store = NaiveConsumeQueueStore(FILE_SIZE // 20)
    for message in messages:
        store.put(message)
    return store


class Life:
    """A log that grows and is rewritten, and the lives of a builder over it; each ends where the disk crashes.

    The frontier, of which this is no test, is what was durable when it was last replaced.
    """

    def __init__(self) -> None:
        self.disk = SimDisk(ROOT, seed=3)
        self.messages = stream(11, 220, 5)
        self.log = self.messages[:60]
        self.frontier: tuple[tuple[QueueMark, ...], int] = ((), 0)
        #: What the log held before the frontier's offset.
        self.covered: Sequence[NaiveMessage] = ()
        self.is_unclean = False
        self.log_begin = 0

    def run(self) -> None:
        """The script: builds, a mark that is synced later, expiry, a clean stop, a rewritten log, an unclean stop."""
        store = self.start()
        self.log = self.messages[:90]
        self.put(store, 60)
        early = self.persist(store.mark(), 90)
        self.log = self.messages[:140]
        self.put(store, 90)
        store.synced(early)
        self.log_begin = self.messages[40].phy_offset
        store.expire(self.log_begin)
        late = self.persist(store.mark(), 140)
        store.synced(late)
        made_durable(self.disk, store)
        self.is_unclean = False
        store.close()
        # The log was cut, and goes on with other messages.
        rest = stream(12, 80, 5, begin=self.messages[120].phy_offset)
        ends = {(m.topic, m.queue_id): m.queue_offset for m in reversed(self.messages[120:])}
        shift = {(m.topic, m.queue_id): ends.get((m.topic, m.queue_id), 0) - m.queue_offset for m in reversed(rest)}
        rest = [m._replace(queue_offset=m.queue_offset + shift[m.topic, m.queue_id]) for m in rest]
        self.messages = [*self.messages[:120], *rest]
        self.log = self.messages[:150]
        store = self.start(self.messages[120].phy_offset)
        self.log = self.messages[:170]
        self.put(store, 150)
        self.persist(store.mark(), 170)
        self.log = self.messages
        self.put(store, 170)
        store.publish()
        store.close()
        self.start().close()

    def start(self, cut_at: int = EVERYTHING) -> ConsumeQueueStore:
        """Recover, and build what the log has."""
        marks, phy_offset = self.frontier
        cut_at = min(cut_at, phy_offset)
        found = planned_queues(
            self.disk, QUEUES, FILE_SIZE, marks, cut_at, is_unclean=self.is_unclean, log_begin=self.log_begin
        )
        assert (found.refill_from, found.reasons) == (None, ())
        self.is_unclean = True
        self.frontier = found.held.queues, cut_at
        self.covered = [message for message in self.covered if message.phy_offset < cut_at]
        store = ConsumeQueueStore(self.disk, QUEUES, FILE_SIZE, 1000)
        found.carry_out(self.disk, store.unsynced)
        store.load(found.held)
        self.put(store, sum(message.phy_offset < cut_at for message in self.log))
        return store

    def put(self, store: ConsumeQueueStore, begin: int) -> None:
        for batch in batches(self.log[begin:], 16):
            store.build(batch)

    def persist(self, progress: OutputMark[QueuesMark], count: int) -> OutputMark[QueuesMark]:
        """What the flusher does."""
        sync_files(self.disk, progress.unsynced)
        sync_dirs(self.disk, progress.directories)
        self.frontier, self.covered = (progress.held.queues, self.messages[count].phy_offset), self.messages[:count]
        return progress

    def check_durable(self) -> None:
        """Whatever happened, the units that the frontier's marks name are there."""
        marks, _ = self.frontier
        queues = naive(self.covered).queues
        assert {mark[:2] for mark in marks} == set(queues)
        wanted = {
            mark[:2]: b"".join(
                UNIT.pack(*unit) for unit in queues[mark[:2]].units[mark.first_offset - queues[mark[:2]].first :]
            )
            for mark in marks
        }
        assert durable_units(sim_tree(self.disk, QUEUES), marks, FILE_SIZE) == wanted

    def check(self) -> None:
        """The files are those of an undisturbed build, but for what has expired."""
        store = self.start()
        store.expire(self.log_begin)
        store.synced(store.mark())
        twin = naive(self.log)
        twin.delete_expired(self.log_begin)
        assert {mark[:2]: mark for mark in store.mark().held.queues} == {
            mark[:2]: QueueMark(*mark) for mark in twin.marks()
        }
        assert sim_tree(self.disk, QUEUES) == twin.tree()


@pytest.mark.parametrize("is_power_lost", [True, False], ids=["power", "kill"])
def test_a_crash_at_every_change_of_the_disk_loses_nothing(*, is_power_lost: bool) -> None:
    whole = Life()
    whole.run()
    changes = whole.disk.changes
    assert changes > 300
    for at in range(0, changes, 1 if is_power_lost else 3):
        life = Life()
        life.disk.make_dir(QUEUES)
        life.disk.crash_at = life.disk.changes + at
        again = 0
        # The recovery is broken off, too, ever later.
        while True:
            try:
                if again == 0:
                    life.run()
                else:
                    life.check()
                break
            except SimCrash:
                if is_power_lost:
                    life.disk.crash(random.Random(at))
                else:
                    life.disk.kill()
                life.check_durable()
                again += 1
                if at % 10 == 0 and again < 6:
                    life.disk.crash_at = life.disk.changes + 3 * again
        if again == 0:
            break
