"""Why nothing is findable from some message to the end of the log, whether the broker runs, was killed or stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from indexd.flush.frontier import StoreCheckpoint
from indexd.storage.lock import BrokerLock
from support.data_directory import T0
from support.indexing_broker import Broker, one, says, state_of

RUNS = BrokerLock(True, 4711, "lock")


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path)


def test_the_tail_of_a_broker_that_runs(broker: Broker) -> None:
    broker.dispatch(broker.messages[:70])
    broker.stopped()
    first = broker.messages[70].store_timestamp
    fresh = state_of(broker, lock=RUNS, looked_at=first + 2000)
    says(one(broker, fresh), "not-dispatched-yet", "a broker runs (pid 4711)", "its first message was 2 s old")
    late = replace(fresh, looked_at=first + 10_000_000)
    says(one(broker, late), "index-off", "which is not full")
    lag = replace(late, checkpoint=StoreCheckpoint(logics_msg_timestamp=first - 1000))
    says(one(broker, lag), "not-dispatched-yet", "the ConsumeQueues end there, too")
    queued = replace(late, checkpoint=StoreCheckpoint(logics_msg_timestamp=first + 5000))
    says(one(broker, queued), "index-off", "messages of it are in the ConsumeQueues")


def test_the_tail_behind_a_full_file(broker: Broker) -> None:
    broker.dispatch(broker.messages[:60])
    broker.stopped()
    late = state_of(broker, lock=RUNS)
    says(one(broker, late), "roll-over-failure", "which is full")
    says(one(broker), "file-deleted", "which is full")
    killed = state_of(broker, has_abort=True)
    says(one(broker, killed), "unclean-stop", "there is an abort file")


def test_the_tail_that_the_next_start_mends(broker: Broker) -> None:
    broker.dispatch(broker.messages[:70])
    broker.stopped()
    (broker.store.root / "abort").write_bytes(b"")
    says(one(broker), "not-dispatched-yet", "dispatches again from log byte 0 on: that mends it")
    last = broker.messages[broker.segment_at(80)]
    flushed = StoreCheckpoint(last.store_timestamp + 3000, last.store_timestamp + 3000, 0)
    later = state_of(broker, checkpoint=flushed)
    says(one(broker, later), "index-off", f"again from log byte {last.phy_offset} on: that mends it from there on only")


def test_a_copy_whose_index_is_older_than_its_log(broker: Broker) -> None:
    broker.dispatch(broker.messages[:75])
    broker.stopped()
    (broker.store.root / "lock").unlink()
    says(one(broker), "not-dispatched-yet", "this is a copy", "the index was copied before the log")


def test_no_index_at_all(broker: Broker) -> None:
    says(one(broker), "unknown", "there is no index file")
    had = state_of(broker, checkpoint=StoreCheckpoint(index_msg_timestamp=T0))
    says(one(broker, had), "file-deleted", "by the checkpoint there was a full index file")


def test_a_broker_that_is_told_not_to_index(broker: Broker) -> None:
    broker.dispatch(broker.messages[:70])
    broker.stopped()
    facts = broker.config.broker.model_copy(update={"index_file_write_enable": False})
    broker.config = broker.config.model_copy(update={"broker": facts})
    says(one(broker), "index-off", "indexFileWriteEnable is false in broker.conf")
