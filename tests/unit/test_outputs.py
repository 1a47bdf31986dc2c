"""The outputs as they are built, expired, checked and recovered: index files, ConsumeQueues, sparse indexes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue.check import check_queues, recover_queues
from indexd.consumequeue.format import BLANK_UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.findings import Findings
from indexd.index.file import IndexService, check_file
from indexd.index.format import FLAVOURS, IndexHeader, IndexLayout, unpack_entry
from indexd.output import Condition, OutputRecovery, RecoveryScope
from indexd.storage.disk import Disk
from support.commitlog_writer import FrameSpec
from support.data_directory import Store
from support.naive import NaiveConsumeQueueStore, NaiveIndexService, QueueMessage
from support.queues import batch_of, batches, carried_out, made_durable, scope_of, sim_tree, stream, tree
from support.sim_disk import SimDisk
from support.strategies import BASE_TIME, Sample, logs
from support.twins import batches as log_batches
from support.twins import encode, naive_messages
from support.verifying import LAYOUT, change, files_of, small_store

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"
EVERYTHING = 1 << 60


# --- index files ---

LAYOUTS = st.tuples(st.integers(1, 50), st.integers(2, 60))
SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@contextmanager
def new_service(slots: int, entries: int, flavour: str = "5.4") -> Iterator[tuple[IndexService, Path]]:
    with tempfile.TemporaryDirectory() as directory:
        layout = IndexLayout(slots, entries)
        service = IndexService(Disk(), Path(directory), layout, FLAVOURS[flavour])
        yield service, Path(directory)
        service.close()


def contents(directory: Path) -> list[bytes]:
    """The files in the order of their names."""
    return [path.read_bytes() for path in sorted(directory.iterdir())]


def built_service(service: IndexService, count: int) -> None:
    """So many messages of a key each, a second apart."""
    specs = (FrameSpec("T", b"", {"KEYS": f"k{n}"}, store_timestamp=BASE_TIME + 1000 * n) for n in range(count))
    for batch in log_batches(encode([Sample(spec) for spec in specs]), "5.4", [50]):
        service.build(batch)


@given(st.data(), logs(max_size=20), LAYOUTS, SPLITS, st.sampled_from(list(FLAVOURS)), st.booleans())
def test_any_log_in_any_batches_makes_the_naive_files(
    data: st.DataObject, samples: list[Sample], layout: tuple[int, int], split: list[int], flavour: str, again: bool
) -> None:
    """Given again, what lies before the last file's end is skipped, and the last message's repeated (spec 11.11)."""
    log = encode(samples)
    parts = log_batches(log, flavour, split)
    assume(parts)
    naive = NaiveIndexService(*layout, flavour)
    with new_service(*layout, flavour) as (service, directory):
        for batch in [*parts, *(parts[data.draw(st.integers(0, len(parts) - 1)) :] if again else [])]:
            service.build(batch)
            for message in naive_messages(log[: batch.end_offset]):
                if message.phy_offset >= batch.begin_offset:
                    naive.build_index(message)
            # What is marked is what stands in the files: published, and readable by anyone.
            for mark in service.mark().held:
                assert IndexHeader.unpack((directory / mark.name).read_bytes()) == mark.header
        service.publish()
        assert contents(directory) == [file.to_bytes() for file in naive.files]
        service.flush()
        last = len(naive.files) - 1
        assert contents(directory) == [file.to_bytes(number == last) for number, file in enumerate(naive.files)]
        assert service.entries == sum(file.index_count - 1 for file in naive.files)
        assert service.rolls == max(last, 0)


@given(st.integers(1, 30), st.integers(2, 6), st.integers(-100, 5000))
def test_expired_files_go_from_the_front_and_never_the_last(count: int, entries: int, least: int) -> None:
    with new_service(3, entries) as (service, directory):
        built_service(service, count)
        before = service.mark().held
        expected = [mark.name for mark in takewhile(lambda one: one.header.end_phy_offset < least, before[:-1])]
        assert service.expire(least) == expected
        mark = service.mark()
        left = [kept.name for kept in before[len(expected) :]]
        assert [kept.name for kept in mark.held] == left
        assert sorted(path.name for path in directory.iterdir()) == [kept.name for kept in before]
        assert mark.expired == tuple(directory / name for name in expected)
        service.synced(mark)
        assert service.mark().expired == ()
        assert sorted(path.name for path in directory.iterdir()) == left
        assert service.expired_files == len(expected)
        assert service.expire(least) == []


def test_the_only_file_stays_even_when_it_is_full_and_expired() -> None:
    with new_service(3, 4) as (service, directory):
        built_service(service, 3)
        later = IndexService(Disk(), directory, IndexLayout(3, 4), FLAVOURS["5.4"])
        later.load(tuple(type(mark)(mark.name, mark.header, True) for mark in service.mark().held))
        assert later.expire(1 << 40) == []
        assert len(contents(directory)) == 1


def checked_file(store: Store, number: int, condition: Condition = Condition.AT_REST) -> Findings:
    mark = store.frontier.index[number]
    with Disk().open_read(store.data / "index" / mark.name) as file:
        return check_file(file, mark, LAYOUT, FLAVOURS[store.flavour], condition, lambda _: None)


def is_harmless(original: bytes, data: bytes, position: int, header: IndexHeader) -> bool:
    """Whether the file could have come from another log: what only a look at the log can tell."""
    number, byte = divmod(position - LAYOUT.entry_position(0), 20)
    if not 0 < number < header.index_count or byte >= 16:
        return False
    before, changed, behind = (unpack_entry(data[LAYOUT.entry_position(number + at) :][:20]) for at in (-1, 0, 1))
    if byte < 4:
        was = unpack_entry(original[LAYOUT.entry_position(number) :][:20]).key_hash
        return changed.key_hash >= 0 and LAYOUT.slot_of(changed.key_hash) == LAYOUT.slot_of(was)
    if byte < 12:
        is_edge = number == 1 or number + 1 == header.index_count
        return not is_edge and before.phy_offset <= changed.phy_offset <= behind.phy_offset
    return changed.time_diff >= 0


@pytest.mark.parametrize("number", [0, 2, 3])
def test_every_changed_byte_of_an_index_file_is_found_or_could_be_another_logs(tmp_path: Path, number: int) -> None:
    store = small_store(tmp_path)
    path, header = files_of(store)[number], store.frontier.index[number].header
    data, missed = path.read_bytes(), 0
    assert len(checked_file(store, number)) == 0
    for position in range(LAYOUT.file_size):
        for bits in (0x01, 0x07, 0x80, 0xFF):
            wrong = data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
            path.write_bytes(wrong)
            harmless = is_harmless(data, wrong + bytes(20), position, header)
            findings = checked_file(store, number)
            assert (len(findings) == 0) == harmless, (position, bits, findings)
            assert all(0 <= finding.position < LAYOUT.file_size for finding in findings.kept)
            missed += harmless
    assert missed
    # Of a file that was cut short, only what its durable entries say is asked.
    path.write_bytes(data)
    assert len(checked_file(store, number, Condition.CUT_SHORT)) == 0


# --- ConsumeQueues: building ---


def make(disk: Disk | None = None, file_units: int = 4, root: Path = QUEUES) -> ConsumeQueueStore:
    return ConsumeQueueStore(disk or SimDisk(ROOT), root, 20 * file_units, 1 << 20)


def naive(messages: Sequence[QueueMessage], file_units: int = 4) -> NaiveConsumeQueueStore:
    store = NaiveConsumeQueueStore(file_units)
    for message in messages:
        store.put(message)
    return store


def one(queue_offset: int, phy_offset: int, queue_id: int = 0, topic: str = "T") -> QueueMessage:
    return QueueMessage(topic, queue_id, queue_offset, phy_offset, 10, 7)


def test_ten_thousand_queues_need_few_descriptors_and_a_cheap_mark() -> None:
    disk, table, opened = SimDisk(ROOT), TopicTable(128), []
    store = make(disk, 2)
    messages = [one(turn, 10 * (10_000 * turn + n), n, f"T{n % 100}") for turn in range(2) for n in range(10_000)]
    disk.before_change = lambda *_: opened.append(len(disk.handles))
    store.build(batch_of(messages, table))
    first = store.mark()
    assert max(opened) <= 65
    assert [tuple(mark) for mark in first.held.queues] == naive(messages, 2).marks()
    assert (len(first.unsynced), len(first.directories)) == (10_000, 10_000 + 100 + 2)
    calls = disk.operations
    store.build(batch_of([one(2, 10**7, 77, "T77")], table))
    second = store.mark()
    assert disk.operations - calls < 20
    changed = [new for old, new in zip(first.held.queues, second.held.queues, strict=True) if old != new]
    assert changed == [QueueMark("T77", 77, 0, 0, 3, 10**7 + 10)]


def test_expiry_asks_the_disk_only_about_queues_that_may_have_changed() -> None:
    disk = SimDisk(ROOT)
    store = make(disk, 1000)
    messages = [*[one(n, 10 * n, 0) for n in range(50)], *[one(n, 500 + 10 * n, 1 + n % 9) for n in range(900)]]
    store.build(batch_of(messages, TopicTable()))
    store.publish()
    calls = disk.counts["pread"]
    store.expire(250)
    assert 0 < disk.counts["pread"] - calls < 10
    assert store.mark().held.queues[0].min_offset == 25


# --- ConsumeQueues: recovery ---

FILE_SIZE = 80
MESSAGES = stream(7, 150, 6)


def build_queues(
    disk: Disk, messages: Sequence[QueueMessage], root: Path = QUEUES, file_size: int = FILE_SIZE
) -> tuple[QueueMark, ...]:
    store = ConsumeQueueStore(disk, root, file_size, 1000)
    for batch in batches(messages, 16):
        store.build(batch)
    held: QueuesMark = made_durable(disk, store).held
    return held.queues


def planned(
    disk: Disk,
    marks: Sequence[QueueMark],
    phy_offset: int = EVERYTHING,
    *,
    root: Path = QUEUES,
    is_unclean: bool = False,
) -> OutputRecovery[QueuesMark]:
    """What is left of queues, if all before ``phy_offset`` is believed, and reading the log goes on there."""
    scope = RecoveryScope(phy_offset, phy_offset, 0, is_unclean)
    return recover_queues(disk, root, QueuesMark(FILE_SIZE, tuple(marks)), FILE_SIZE, scope, 1000)


def test_what_is_whole_is_left_alone() -> None:
    disk = SimDisk(ROOT)
    marks = build_queues(disk, MESSAGES)
    found, changes = planned(disk, marks), disk.changes
    assert found == OutputRecovery(QueuesMark(FILE_SIZE, marks))
    assert found.held.queues[0] is marks[0]
    carried_out(disk, found)
    assert disk.changes == changes


def test_a_queue_of_blank_units_alone_is_none() -> None:
    disk = SimDisk(ROOT)
    marks = build_queues(disk, [message._replace(queue_offset=message.queue_offset + 3) for message in MESSAGES])
    found = planned(disk, marks, 0)
    assert found.held.queues == ()
    carried_out(disk, found)
    assert (sim_tree(disk, QUEUES), disk.list_dirs(QUEUES)) == ({}, [])


def test_a_last_unit_that_is_another_makes_the_queue_anew() -> None:
    disk = SimDisk(ROOT)
    marks = build_queues(disk, MESSAGES)
    victim, last = marks[1], marks[1].max_offset - 1
    path = QUEUES / victim.topic / str(victim.queue_id) / f"{last // 4 * 80:020d}"
    disk.open_write(path).pwrite(b"\1", last % 4 * 20 + 7)
    assert planned(disk, marks).held.queues == marks
    found = planned(disk, marks, MESSAGES[-1].phy_offset, is_unclean=True)
    assert victim not in found.held.queues
    assert found.refill_from == 0
    assert f"unit {last} is not the one that was written" in found.reasons[0]


@pytest.mark.parametrize("numbers", [(1, 1, 3, 99), (-4, 1, 3, 99), (4, 1, 8, 99), (0, 9, 8, 99), (4, 4, 4, -1, 4)])
def test_a_mark_that_contradicts_itself_is_not_believed(numbers: tuple[int, ...]) -> None:
    found = planned(SimDisk(ROOT), [QueueMark("Topic0", 0, *numbers)], 500)
    assert found.held.queues == ()
    assert "contradicts itself" in found.reasons[0]


def test_queues_that_no_mark_names_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    disk, root, name = Disk(), tmp_path / "q", "00000000000000000000"
    marks = build_queues(disk, MESSAGES, root)
    ours = tree(root)
    folders = ["Topic0/77", "Gone/0", "Gone/-3", "Half/1"]
    leftovers = [*(f"{folder}/{name}" for folder in folders), "Topic0/0/00000000000099999980"]
    foreign = ["Topic0/readme", "Topic0/0/notes.txt", f"Topic0/007/{name}", f"other/{name}", "file"]
    foreign += ["Half/1/x/y", "Half/2"]
    for path in (*leftovers, *foreign):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")
    recovered = carried_out(disk, planned(disk, marks, root=root))
    assert tree(root) == ours | dict.fromkeys(foreign, b"x")
    assert not (root / "Gone").exists()
    assert {root, root / "Topic0", root / "Topic0/0", root / "Half/1"} == set(recovered.directories)
    assert planned(disk, marks, root=root).delete == ()


# --- ConsumeQueues: what the check finds ---


@pytest.mark.parametrize(
    ("units", "at", "data", "kind", "words"),
    [
        ([1, 5], 0, b"\x80", "unit-phy-offset", "is negative"),
        ([1, 5], 0, bytes(8), "unit-order", "the phy offset 0 lies before the end of the message before it"),
        ([1, 5], 8, bytes(4), "unit-size", "the size 0 is not more than 0"),
        ([1, 5], 8, b"\xff", "unit-size", "is not more than 0"),
        ([0, 1, 5], 0, BLANK_UNIT, "unit-blank", "a blank unit stands where a message's should"),
        ([1, 5], 0, bytes(20), "unit-size", "the size 0 is not more than 0"),
        ([-1], 0, (1 << 40).to_bytes(8, "big"), "queue-end", "as the frontier says"),
    ],
)
def test_a_unit_that_cannot_be_is_found(
    tmp_path: Path, units: list[int], at: int, data: bytes, kind: str, words: str
) -> None:
    marks = build_queues(Disk(), MESSAGES, tmp_path)
    mark = next(mark for mark in marks if mark.min_offset == 0 and mark.max_offset % 4 > 1)
    for unit in (unit % mark.max_offset for unit in units):
        path = tmp_path / mark.topic / str(mark.queue_id) / f"{unit // 4 * 80:020d}"
        before = path.read_bytes()
        change(path, unit % 4 * 20 + at, data)
        found = check_queues(Disk(), tmp_path, QueuesMark(FILE_SIZE, marks), scope_of())
        path.write_bytes(before)
        (finding,) = found.kept
        assert found.counts == {kind: 1}
        assert words in finding.text
        if kind != "queue-end":
            assert finding.file == f"consumequeue/{path.relative_to(tmp_path)}"
            assert finding.position // 20 == unit % 4
            assert f"unit {unit}:" in finding.text
