"""The audit of ConsumeQueues beside a broker that goes on dispatching: what appears later is no difference."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from indexd.audit import AuditPlan, audit_task, plan_audit, queue_watch, task
from indexd.audit.queues_found import QueuesAudit, join_queues, plan_queues
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.storage.disk import Disk
from support.auditing_queues import COUNT, Queue, audit_queues, config_of, store_of
from support.data_directory import T0
from support.queues import batches_of
from support.small_log import SEGMENT_SIZE


@pytest.fixture
def config(tmp_path: Path) -> Config:
    # Nothing to wait for in an index: no message has a key.
    rand, store = random.Random(5), tmp_path / "store"
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for number in range(COUNT):
            flag = rand.choice([0, 0, 0, 0x4, 0x8, 0xC])
            topic, body = rand.choice(["TopicTest", "OrderPaid"]), rand.randbytes(rand.randrange(300))
            writer.append(
                FrameSpec(topic, body, queue_id=rand.randrange(4), sys_flag=flag, store_timestamp=T0 + number)
            )
    (store / "index").mkdir()
    return config_of(store)


def work_of(config: Config) -> list[DispatchBatch]:
    return list(batches_of(store_of(config) / "commitlog", SEGMENT_SIZE, rows_max=50))


def broker_of(config: Config) -> ConsumeQueueStore:
    return ConsumeQueueStore(Disk(), store_of(config) / "consumequeue", config.store.consume_queue_file_size, 1000)


def dispatch(broker: ConsumeQueueStore, work: list[DispatchBatch], pause: float = 0) -> None:
    for batch in work:
        broker.build(batch)
        broker.publish()
        time.sleep(pause)


def plan_now(config: Config) -> AuditPlan:
    plan = plan_audit(Disk(), config)
    plan_queues(Disk(), config, plan)
    return plan


def run(plan: AuditPlan, config: Config) -> QueuesAudit:
    return join_queues(plan, [audit_task(one, Disk(), config) for one in plan.tasks])


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.98])
def test_what_was_dispatched_meanwhile_is_found(config: Config, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    work, broker = work_of(config), broker_of(config)
    done = int(len(work) * share)
    dispatch(broker, work[:done])
    plan = plan_now(config)
    dispatch(broker, work[done:])
    broker.close()
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = run(plan, config)
    assert found.is_sound, found.rows()
    assert found.seen.messages == found.seen.units > COUNT / 2
    # A copy that is not written any more is what it is.
    monkeypatch.setattr(task, "is_live", lambda *_: False)
    assert not run(plan, config).is_sound
    assert audit_queues(config).is_sound


def test_what_is_being_dispatched_is_waited_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    work, broker = work_of(config), broker_of(config)
    dispatch(broker, work[:10])
    plan = plan_now(config)
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    at_work = threading.Thread(target=dispatch, args=(broker, work[10:], 0.02))
    at_work.start()
    found = run(plan, config)
    at_work.join()
    broker.close()
    assert found.is_sound, found.rows()


def test_what_is_written_after_the_audit_has_read_the_log_is_nothing_to_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, broker = work_of(config), broker_of(config)
    dispatch(broker, work)
    plan = plan_now(config)
    broker.close()
    max((store_of(config) / "commitlog").iterdir()).unlink()
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    # What was there when the audit began stands for messages that were there, too.
    assert set(run(plan, config).counts) == {"unit-behind-log"}
    early = plan_audit(Disk(), config)
    tree = store_of(config) / "consumequeue"
    tree.rename(tree.with_name("later"))
    plan_queues(Disk(), config, early)
    tree.with_name("later").rename(tree)
    found = run(early, config)
    assert found.is_sound, found.rows()


def test_what_is_not_dispatched_is_missing_all_the_same(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    work, broker = work_of(config), broker_of(config)
    dispatch(broker, work[:-4])
    plan = plan_now(config)
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    began = time.monotonic()
    found = run(plan, config)
    assert 0.9 < time.monotonic() - began < 10
    late = sum(flags & 0xC in (0, 8) for batch in work[-4:] for flags in batch.columns.sys_flag[: batch.rows].tolist())
    assert sum(found.counts.values()) == late
    assert set(found.counts) == {"unit-missing"}
    broker.close()


def test_a_difference_among_old_units_costs_no_wait(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    work, broker = work_of(config), broker_of(config)
    dispatch(broker, work)
    broker.close()
    Queue(config).change(5, phy_offset=-1)
    plan = plan_now(config)
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("nothing is waited for"))
    monkeypatch.setattr(queue_watch, "time", clock)
    assert run(plan, config).counts == {"unit-missing": 1, "unit-phy-offset": 1}
