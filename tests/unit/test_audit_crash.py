"""What a crash right now would cost, held against what a crash then does cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import plan_audit
from indexd.audit.causes import CrashCost, SegmentStart, StoreState, crash_cost, dispatch_start, look_at_store
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock
from support.auditing import audit
from support.data_directory import T0
from support.indexing_broker import LAYOUT, Broker
from support.naive import NaiveIndexService

SEGMENTS = tuple(SegmentStart(100 * n, 100 * n + 100, T0 + 10_000 * n) for n in range(30))


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """Four full files, and ten messages in the fifth."""
    broker = Broker(tmp_path)
    broker.dispatch(broker.messages)
    broker.stopped()
    return broker


def state_of(broker: Broker, checkpoint: StoreCheckpoint | None, **changes: object) -> StoreState:
    state = look_at_store(Disk(), broker.config)
    return replace(state, checkpoint=checkpoint, **changes)  # type: ignore[arg-type]  # as the tests name them


def cost(broker: Broker, state: StoreState) -> CrashCost:
    return crash_cost(Disk(), broker.config, plan_audit(Disk(), broker.config), state)


def flushed(broker: Broker, number: int, index: int | None = None) -> StoreCheckpoint:
    """All is flushed up to the message before ``number``, as the broker writes it down."""
    time = broker.messages[number].store_timestamp + 3000
    return StoreCheckpoint(time, time, broker.service.index_msg_timestamp if index is None else index)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(9, 60), st.integers(20, 90), st.data())
def test_it_is_what_the_next_start_loses(seed: int, index_num: int, indexed: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as root:
        broker = Broker(Path(root), IndexLayout(7, index_num), seed=seed)
        broker.dispatch(broker.messages[:indexed])
        broker.stopped()
        at = data.draw(st.integers(0, indexed - 1))
        state = state_of(broker, flushed(broker, at), has_abort=True)
        expected = cost(broker, state)
        # Before the crash all is findable up to the last message that was dispatched.
        assert audit(broker.config).missing_keys == 2 * (90 - indexed)

        for path in broker.files:
            path.unlink()
        broker.killed()
        broker.dispatch(broker.messages[broker.segment_at(at) :])
        broker.stopped()
        assert audit(broker.config).missing_keys == expected.lost_keys
        assert expected.dispatch_offset == broker.messages[broker.segment_at(at)].phy_offset
        assert expected.keys == 2 * indexed - sum(file.index_count - 1 for file in _kept(broker, indexed).files)


def _kept(broker: Broker, indexed: int) -> NaiveIndexService:
    again = NaiveIndexService(broker.service.hash_slot_num, broker.service.index_num)
    for message in broker.messages[:indexed]:
        again.build_index(message)
    again.files = [file for file in again.files if file.end_timestamp <= again.index_msg_timestamp]
    return again


def test_without_a_checkpoint_all_goes_and_all_is_dispatched_again(broker: Broker) -> None:
    found = cost(broker, state_of(broker, None, has_abort=True))
    assert (len(found.thrown), found.keys, found.lost_keys, found.dispatch_offset) == (5, 180, 0, 0)
    first, second = found.lines()
    assert first.startswith("there is no checkpoint: an unclean start trusts no index file")
    assert second.startswith("the broker ended without a clean stop: its next start will throw away 5 index files")
    assert second.endswith("build all of them again from log byte 0 on")


def test_with_message_index_safe_nothing_is_lost(broker: Broker) -> None:
    facts = broker.config.broker.model_copy(update={"message_index_safe": True})
    broker.config = broker.config.model_copy(update={"broker": facts})
    found = cost(broker, state_of(broker, flushed(broker, 89)))
    assert (found.keys, found.lost_keys) == (20, 0)
    assert found.dispatch_offset == broker.messages[broker.segment_at(79)].phy_offset


def test_a_broker_that_does_not_index_builds_nothing_again(broker: Broker) -> None:
    facts = broker.config.broker.model_copy(update={"message_index_enable": False})
    broker.config = broker.config.model_copy(update={"broker": facts})
    found = cost(broker, state_of(broker, flushed(broker, 0, 0)))
    assert (len(found.thrown), found.keys, found.lost_keys) == (5, 180, 180)
    assert "nothing would build them again: indexing is off" in found.lines()[0]


def test_a_file_that_expires_meanwhile_and_one_of_another_size(broker: Broker) -> None:
    plan = plan_audit(Disk(), broker.config)
    broker.files[0].unlink()
    found = crash_cost(Disk(), broker.config, plan, state_of(broker, flushed(broker, 0, 0)))
    assert (len(found.thrown), found.keys) == (5, 140)
    with broker.files[0].open("r+b") as file:
        file.truncate(LAYOUT.file_size // 2)
    found = cost(broker, state_of(broker, flushed(broker, 0, 0)))
    assert (len(found.thrown), found.keys) == (4, 100)


def begin_of(time: int, flavour: str = "4.7", *, logics: int | None = None, broker: Broker) -> int:
    checkpoint = StoreCheckpoint(time, time if logics is None else logics, 0)
    found = dispatch_start(SEGMENTS, checkpoint, broker.config, flavour)
    assert found is not None
    return found.begin


def test_the_segment_from_which_it_is_dispatched_again(broker: Broker) -> None:
    assert begin_of(T0 + 10_000 * 25 + 3000, broker=broker) == 2500
    assert begin_of(T0 + 10_000 * 25 + 2999, broker=broker) == 2400
    assert begin_of(T0 + 10**9, logics=T0 + 10_000 * 21 + 3000, broker=broker) == 2100
    assert begin_of(T0 + 10**9, logics=0, broker=broker) == 0
    # 5.4.0 looks at ten segments and takes the tenth, whatever it holds.
    assert begin_of(T0 + 10_000 * 20 + 3000, "5.4", broker=broker) == 2000
    assert begin_of(T0 + 10_000 * 19 + 3000, "5.4", broker=broker) == 2000
    assert begin_of(T0 + 10_000 * 19 + 3000, broker=broker) == 1900
    assert dispatch_start((), StoreCheckpoint(), broker.config, "5.4") is None


def test_whose_next_start_it_is(broker: Broker) -> None:
    checkpoint = flushed(broker, 89)
    unknown = BrokerLock(None, None, "unknown", "it may not be looked at")
    runs = BrokerLock(True, 4711, "lock")
    for changes, when in (
        ({"lock": runs, "has_abort": True}, "now"),
        ({"lock": unknown, "has_abort": True}, "now"),
        ({"lock": unknown, "has_abort": False}, "later"),
        ({"has_abort": True}, "next-start"),
        ({"has_abort": False}, "later"),
    ):
        found = cost(broker, state_of(broker, checkpoint, **changes))
        assert (found.when, found.to_json()["when"]) == (when, when)
