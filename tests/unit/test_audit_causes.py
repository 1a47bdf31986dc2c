"""Why keys are not findable, and what a crash right now would cost: held against stores to which it has happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import plan_audit
from indexd.audit.causes import (
    CrashCost,
    SegmentStart,
    crash_cost,
    dispatch_start,
    hole_causes,
    look_at_store,
)
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock
from support.auditing import audit
from support.data_directory import T0, spec
from support.indexing_broker import LAYOUT, Broker, causes, checked, one, says, state_of
from support.naive import NaiveIndexService


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path)


def test_an_unclean_stop(broker: Broker) -> None:
    broker.dispatch(broker.messages[:59])
    broker.killed()
    broker.dispatch(broker.messages[broker.segment_at(57) :])
    broker.stopped()
    names = [path.name for path in broker.files]
    says(
        one(broker),
        "unclean-stop",
        f"right behind index/{names[1]}, which is full",
        f"where the segment at {broker.messages[broker.segment_at(57)].phy_offset} begins",
        f"index/{names[2]} counts from the end of index/{names[1]}",
    )


@pytest.mark.parametrize(
    ("dispatched", "index_num", "deleted", "what", "texts"),
    [
        (
            [slice(None)],
            41,
            1,
            "file-deleted",
            [
                "which is full",
                "40 keys fill exactly 1 index file",
                "counts from the end of a file that is not here, which ended 1 s before it",
            ],
        ),
        ([slice(None)], 40, 0, "file-deleted", ["some keys of its last message are in the file behind it"]),
        (
            [slice(24), slice(31, None)],
            41,
            None,
            "index-off",
            ["index/20260101000000001 has entries of messages on both sides of it"],
        ),
        (
            [slice(31, None)],
            41,
            None,
            "index-off",
            ["counts from the end of no file: the index was begun there"],
        ),
        (
            [slice(20), slice(26, None)],
            41,
            None,
            "roll-over-failure",
            ["which is full", "it ends in the middle of a segment"],
        ),
        ([], 41, None, "unknown", ["there is no index file"]),
    ],
)
def test_the_hole_of_what_was_never_indexed_or_deleted(
    tmp_path: Path, dispatched: list[slice], index_num: int, deleted: int | None, what: str, texts: list[str]
) -> None:
    broker = Broker(tmp_path, IndexLayout(7, index_num))
    for part in dispatched:
        broker.dispatch(broker.messages[part])
    broker.stopped()
    if deleted is not None:
        broker.files[deleted].unlink()
    says(one(broker), what, *texts)


def test_a_log_that_was_cut_and_written_again(tmp_path: Path) -> None:
    # Its index is that of a log that went on otherwise: of messages that are not there, or of more than there are.
    for count, later, texts in (
        (
            50,
            60,
            [
                "20 entries of index/20260101000000001 point to log bytes",
                "where the log holds other messages now",
                "and the last of these entries points to {}",
            ],
        ),
        (90, 9, ["ends at log byte {}, and the log ends at"]),
    ):
        broker, other = Broker(tmp_path / f"{count}"), Broker(tmp_path / f"other{count}", messages=30)
        broker.dispatch(broker.messages[:count])
        for number in range(later):
            other.store.append(spec(T0 + 60_000 + 1700 * number, size=83, KEYS=f"c{number} d{number}"))
        other.messages, other.service = other.store.messages(), broker.service
        if later > count:
            other.dispatch(other.messages[30:])
        other.stopped()
        says(one(other), "log-replaced", *(text.format(broker.messages[count - 1].phy_offset) for text in texts))


def test_one_wrong_entry(broker: Broker) -> None:
    broker.dispatch(broker.messages)
    file = broker.service.files[2]
    key_hash, *rest = file.entries[7]
    file.entries[7] = (key_hash + LAYOUT.hash_slot_num, *rest)
    broker.stopped()
    says(one(broker), "file-damaged", "is of no key of that message")


def test_files_that_are_cut_or_zeros(tmp_path: Path) -> None:
    broker = Broker.sound(tmp_path)
    path = broker.files[1]
    data = path.read_bytes()
    path.write_bytes(data[: LAYOUT.entry_position(25)].ljust(len(data), b"\0"))
    assert {cause.what for cause in causes(broker)} == {"file-damaged"}
    path.write_bytes(data[: len(data) // 2])
    (cause,) = causes(broker, check=False)
    says(cause, "file-unreadable", "by its name index/20260101000000001 belongs there")


def test_files_that_were_put_together_by_hand(broker: Broker) -> None:
    broker.dispatch(broker.messages[:30])
    later = NaiveIndexService(LAYOUT.hash_slot_num, LAYOUT.index_num)
    for message in broker.messages[45:]:
        later.build_index(message)
    broker.service.files += later.files
    broker.stopped()
    says(one(broker), "unknown", "which is not full", "by hand")


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(9, 60), st.integers(20, 80))
def test_whenever_it_is_killed_the_hole_is_an_unclean_stop(seed: int, index_num: int, killed_at: int) -> None:
    with TemporaryDirectory() as root:
        broker = Broker(Path(root), IndexLayout(7, index_num), seed=seed)
        broker.dispatch(broker.messages[:killed_at])
        broker.killed()
        broker.dispatch(broker.messages[broker.segment_at(killed_at - 1) :])
        broker.stopped()
        found = checked(broker.config)
        assert len(found.holes) <= 1
        judged = hole_causes(found, look_at_store(Disk(), broker.config), broker.config)
        assert [cause.what for cause in judged] == ["unclean-stop"] * len(found.holes), judged


RUNS = BrokerLock(True, 4711, "lock")


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
    configured(broker, index_file_write_enable=False)
    says(one(broker), "index-off", "indexFileWriteEnable is false in broker.conf")


@pytest.mark.parametrize(
    ("count", "changes", "what", "texts"),
    [
        (60, {"lock": RUNS}, "roll-over-failure", ["which is full"]),
        (60, {}, "file-deleted", ["which is full"]),
        (60, {"has_abort": True}, "unclean-stop", ["there is an abort file"]),
        (75, {"has_lock_file": False}, "not-dispatched-yet", ["a copy", "the index was copied before the log"]),
        (0, {"checkpoint": StoreCheckpoint(index_msg_timestamp=T0)}, "file-deleted", ["there was a full index file"]),
    ],
)
def test_the_tail_of_a_stopped_broker_or_a_copy(
    broker: Broker, count: int, changes: dict[str, object], what: str, texts: list[str]
) -> None:
    broker.dispatch(broker.messages[:count])
    broker.stopped()
    says(one(broker, state_of(broker, **changes)), what, *texts)


def test_the_tail_that_the_next_start_mends(broker: Broker) -> None:
    broker.dispatch(broker.messages[:70])
    broker.stopped()
    (broker.store.root / "abort").write_bytes(b"")
    says(one(broker), "not-dispatched-yet", "dispatches again from log byte 0 on: that mends it")
    last = broker.messages[broker.segment_at(80)]
    flushed = StoreCheckpoint(last.store_timestamp + 3000, last.store_timestamp + 3000, 0)
    later = state_of(broker, checkpoint=flushed)
    says(one(broker, later), "index-off", f"again from log byte {last.phy_offset} on: that mends it from there on only")


SEGMENTS = tuple(SegmentStart(100 * n, T0 + 10_000 * n) for n in range(30))


@pytest.fixture
def full(tmp_path: Path) -> Broker:
    """Four full files, and ten messages in the fifth."""
    return Broker.sound(tmp_path)


def cost(full: Broker, checkpoint: StoreCheckpoint | None, **changes: object) -> CrashCost:
    state = state_of(full, checkpoint=checkpoint, **changes)
    return crash_cost(Disk(), full.config, plan_audit(Disk(), full.config), state)


def flushed(full: Broker, number: int, index: int | None = None) -> StoreCheckpoint:
    """All is flushed up to the message before ``number``, as the broker writes it down."""
    time = full.messages[number].store_timestamp + 3000
    return StoreCheckpoint(time, time, full.service.index_msg_timestamp if index is None else index)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(9, 60), st.integers(20, 90), st.data())
def test_it_is_what_the_next_start_loses(seed: int, index_num: int, indexed: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as root:
        full = Broker(Path(root), IndexLayout(7, index_num), seed=seed)
        full.dispatch(full.messages[:indexed])
        full.stopped()
        at = data.draw(st.integers(0, indexed - 1))
        expected = cost(full, flushed(full, at), has_abort=True)
        # Before the crash all is findable up to the last message that was dispatched.
        assert audit(full.config).missing_keys == 2 * (90 - indexed)

        for path in full.files:
            path.unlink()
        full.killed()
        full.dispatch(full.messages[full.segment_at(at) :])
        full.stopped()
        assert audit(full.config).missing_keys == expected.lost_keys
        assert expected.dispatch_offset == full.messages[full.segment_at(at)].phy_offset
        assert expected.keys == 2 * indexed - sum(file.index_count - 1 for file in _kept(full, indexed).files)


def _kept(full: Broker, indexed: int) -> NaiveIndexService:
    again = NaiveIndexService(full.service.hash_slot_num, full.service.index_num)
    for message in full.messages[:indexed]:
        again.build_index(message)
    again.files = [file for file in again.files if file.end_timestamp <= again.index_msg_timestamp]
    return again


@pytest.mark.parametrize(
    ("facts", "flushed_to", "wanted", "texts"),
    [
        (
            {},
            None,
            (5, 180, 0, 0),
            [
                "there is no checkpoint: an unclean start trusts no index file",
                "the broker ended without a clean stop: its next start will throw away 5 index files",
                "build all of them again from log byte 0 on",
            ],
        ),
        ({"message_index_safe": True}, (89, None), (1, 20, 0, 79), []),
        ({"message_index_enable": False}, (0, 0), (5, 180, 180, 0), ["will build them again: indexing is off"]),
    ],
)
def test_what_a_crash_costs(
    full: Broker,
    facts: dict[str, object],
    flushed_to: tuple[int, int | None] | None,
    wanted: tuple[int, ...],
    texts: list[str],
) -> None:
    configured(full, **facts)
    found = cost(full, None if flushed_to is None else flushed(full, *flushed_to), has_abort=True)
    begin = full.messages[full.segment_at(wanted[-1])].phy_offset
    assert (len(found.thrown), found.keys, found.lost_keys, found.dispatch_offset) == (*wanted[:3], begin)
    assert all(text in "\n".join(found.lines()) for text in texts), found.lines()


def configured(full: Broker, **facts: object) -> None:
    full.config = full.config.model_copy(update={"broker": full.config.broker.model_copy(update=facts)})


@pytest.mark.parametrize(
    ("time", "logics", "flavour", "begin"),
    [
        (T0 + 10_000 * 25 + 3000, None, "4.7", 2500),
        (T0 + 10_000 * 25 + 2999, None, "4.7", 2400),
        (T0 + 10**9, T0 + 10_000 * 21 + 3000, "4.7", 2100),
        (T0 + 10**9, 0, "4.7", 0),
        # 5.4.0 looks at ten segments and takes the tenth, whatever it holds.
        (T0 + 10_000 * 20 + 3000, None, "5.4", 2000),
        (T0 + 10_000 * 19 + 3000, None, "5.4", 2000),
        (T0 + 10_000 * 19 + 3000, None, "4.7", 1900),
    ],
)
def test_the_segment_from_which_it_is_dispatched_again(
    tmp_path: Path, time: int, logics: int | None, flavour: str, begin: int
) -> None:
    config = Broker(tmp_path, messages=1).config
    found = dispatch_start(SEGMENTS, StoreCheckpoint(time, time if logics is None else logics, 0), config, flavour)
    assert found is not None
    assert found.begin == begin
    assert dispatch_start((), StoreCheckpoint(), config, flavour) is None


def test_whose_next_start_it_is(full: Broker) -> None:
    checkpoint = flushed(full, 89)
    unknown = BrokerLock(None, None, "unknown", "it may not be looked at")
    runs = BrokerLock(True, 4711, "lock")
    for changes, when in (
        ({"lock": runs, "has_abort": True}, "now"),
        ({"lock": unknown, "has_abort": True}, "now"),
        ({"lock": unknown, "has_abort": False}, "later"),
        ({"has_abort": True}, "next-start"),
        ({"has_abort": False}, "later"),
    ):
        found = cost(full, checkpoint, **changes)
        assert (found.when, found.to_json()["when"]) == (when, when)
