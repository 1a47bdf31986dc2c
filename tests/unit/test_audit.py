"""The audit of index files: RocketMQ's own stores, planted faults, and plain twins of what it is made of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import Audit, audit_task, join, plan_audit
from indexd.audit.report import WIDTHS, Answers
from indexd.compare.index import (
    NOTED_MAX,
)
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk
from support.auditing import LAYOUT as LARGE
from support.auditing import (
    audit,
    audit_plan,
    config_for,
    config_of_golden,
    copied,
    files_of,
    index_log,
    key_texts,
    lost_keys,
    wrong_store,
)
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.data_directory import SEGMENT, T0, Store, spec
from support.goldens import GOLDENS, unpack
from support.indexing_broker import Broker, checked
from support.naive import naive_frames
from support.repairing import report_of
from support.small_log import SEGMENT_SIZE, write_log
from support.strategies import damages
from support.verifying import LAYOUT, PHY, TIME, Damage, chain, change, change_entry, entry, header, slot


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Several segments and files; not to be changed."""
    store = tmp_path_factory.mktemp("small") / "store"
    write_log(store, 4000)
    config = config_for(store, LARGE, SEGMENT_SIZE)
    index_log(config)
    return config


@pytest.fixture
def copy(small: Config, tmp_path: Path) -> Config:
    return copied(small, tmp_path / "store")


def flavours_of(found: Audit) -> list[str]:
    assert found.is_sound, list(found.rows())
    return [era.flavour for era in found.eras]


@pytest.mark.parametrize("name", GOLDENS)
def test_nothing_is_wrong_with_what_rocketmq_wrote(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    report = report_of(config_of_golden(golden), 50)
    found, rows = report.audit, golden.messages()
    assert (set(flavours_of(found)), report.plan.is_flavour_given) == ({golden.flavour}, False)
    assert (found.messages, found.log_end) == (len(rows), rows[-1]["phyOffset"] + rows[-1]["size"])
    frames = naive_frames(golden.root / "commitlog", golden.segment_size)
    assert found.keys == found.entries == sum(len(key_texts(frame, golden.flavour)) for frame in frames)
    assert len(found.files) == len(golden.index_files())
    # RocketMQ's own query finds all of the sample.
    answers = report.answers
    assert answers is not None
    assert answers.drawn == answers.asked >= 40
    assert {(share["queries"], share["missed"]) for share in answers.shares} == {(answers.asked, 0)}


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
def test_an_index_of_our_own_has_no_findings_in_any_flavour(tmp_path: Path, flavour: str) -> None:
    store = tmp_path / "store"
    write_log(store, 3000)
    index_log(config_for(store, LARGE, SEGMENT_SIZE), flavour)
    assert flavours_of(audit(config_for(store, LARGE, SEGMENT_SIZE))) == ["4.7" if flavour == "4.0" else flavour]
    if flavour == "5.4":
        assert audit(config_for(store, LARGE, SEGMENT_SIZE, flavour="4.7")).counts["entry-without-key"] > 1000


def test_what_has_expired_is_no_finding(small: Config, copy: Config) -> None:
    for segment in files_of(copy, "commitlog")[:2]:
        segment.unlink()
    found = audit(copy)
    assert found.is_sound, list(found.rows())
    assert found.log_begin == 2 * SEGMENT_SIZE
    assert found.expired_entries > 4000  # a whole file, and a part of the next
    assert found.expired_entries + found.entries == audit(small).entries


def test_the_log_was_cut_and_entries_point_behind_it(small: Config, copy: Config) -> None:
    files_of(copy, "commitlog")[-1].unlink()
    found = audit(copy)
    assert found.counts == {"entry-behind-log": audit(small).entries - found.keys}
    assert found.missing_keys == 0


def test_indexed_twice_after_a_crash(copy: Config) -> None:
    # The newest file was thrown away, and re-dispatch began before its first message (spec rocketmq-store 7.5).
    files_of(copy)[-1].unlink()
    index_log(copy, begin=SEGMENT_SIZE, name=20270101000000000)
    found = checked(copy)
    assert found.missing_keys == 0
    # Of the files that were made anew, those that end before the newest old one have names out of order.
    assert set(found.counts) == {"entry-twice", "file-order"}
    assert found.counts["entry-twice"] == found.entries - found.keys


def test_wherever_the_work_is_cut_it_comes_to_the_same(tmp_path: Path) -> None:
    config = wrong_store(tmp_path / "store")
    index_log(config, begin=SEGMENT_SIZE, name=20270101000000000)
    for path in files_of(config)[-2:]:
        path.unlink()
    wanted = checked(config)
    assert len(wanted.counts) >= 5
    assert wanted.hole_count > 3
    offsets = [frame.phy_offset for frame in naive_frames(tmp_path / "store" / "commitlog", SEGMENT_SIZE)]

    @settings(max_examples=25)
    @given(st.lists(st.sampled_from(offsets), max_size=8), st.sampled_from([None, SEGMENT_SIZE]), st.randoms())
    def check(cuts: list[int], size: int | None, order: random.Random) -> None:
        plan = plan_audit(Disk(), config, cuts=cuts, size=size)
        stretches = [(task.begin, task.end) for task in plan.tasks if task.begin < task.end]
        assert [end for _, end in stretches[:-1]] == [begin for begin, _ in stretches[1:]]
        assert (stretches[0][0], stretches[-1][1]) == (0, NEVER)
        assert set(cuts) - {0} <= {begin for begin, _ in stretches}
        numbers = list(range(len(plan.tasks)))
        order.shuffle(numbers)
        assert audit_plan(plan, config, numbers) == wanted

    check()


BEFORE, BETWEEN, NOW = "3.x", "4.7", "5.4"


def write(store: Path, count: int, keys: int, tagged: Callable[[int], bool], entries: int = 400) -> Config:
    """Messages with a unique key, ``keys`` further ones, and a tag where wanted."""
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for number in range(count):
            texts = {"UNIQ_KEY": f"{number:032X}", "KEYS": " ".join(f"k{number}-{key}" for key in range(keys))}
            properties = {name: text for name, text in texts.items() if text} | (
                {"TAGS": "A"} if tagged(number) else {}
            )
            writer.append(FrameSpec("Orders", b"", properties, store_timestamp=1_700_000_000_000 + number))
    return config_for(store, IndexLayout(100, entries), SEGMENT_SIZE)


@pytest.mark.parametrize(
    ("flavour", "keys", "entries", "tagged"),
    [
        # Files, and the windows that are read of them, cut messages in two.
        *((NOW, keys, entries, lambda _: False) for keys in range(4) for entries in (400, 40_000)),
        *((BEFORE, keys, 400, lambda number: number % 3 == 0) for keys in (1, 2, 3)),
        # New files do not tell: they are judged by those before.
        (BETWEEN, 1, 400, lambda number: number < 500),
    ],
)
def test_the_flavour_of_a_sound_store_is_known(
    tmp_path: Path, flavour: str, keys: int, entries: int, tagged: Callable[[int], bool]
) -> None:
    config = write(tmp_path / "store", 1500, keys, tagged, entries)
    index_log(config, flavour)
    assert flavours_of(audit(config)) == [flavour]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Ten messages of two or four keys: three full files of nine entries, and one of three that is open."""
    store = Store(tmp_path, LAYOUT)
    for number in range(10):
        extra = {"UNIQ_KEY": f"u{number}", "TAGS": "t"} if number % 2 else {}
        store.append(spec(T0 + 1700 * number, size=60, KEYS=f"a{number} b{number % 3}", **extra))
    config = config_for(store.root, LAYOUT, SEGMENT)
    index_log(config)
    assert audit(config).is_sound
    return config


@pytest.mark.parametrize(
    ("file", "damage", "kind", "lost"),
    [
        (1, entry(4, PHY, -1), "entry-phy-offset", "missing"),
        (1, entry(4, PHY, 0), "entry-phy-offset-range", "missing"),
        (1, entry(4, PHY, 1 << 40), "entry-phy-offset-range", "missing"),
        # Entry 1 counts from a file that may be gone: nobody can say.
        (1, entry(1, TIME, lambda one: one.time_diff + 5), None, None),
        (1, entry(2, TIME, lambda one: one.time_diff + 5), "entry-time-difference", None),
        (1, entry(9, TIME, lambda one: one.time_diff + 5), "entry-time-difference", None),
        (1, entry(9, TIME, -1), "entry-time-difference", "unreachable"),
        (1, chain(lambda number, _: number), "chain-loop", "unreachable"),
        (1, chain(10), "chain-range", "unreachable"),
        (1, chain(-1), "chain-range", "unreachable"),
        (1, chain(0), "chain-previous", "unreachable"),
        (1, chain(lambda _, one: one.prev_index - 1), "chain-previous", ""),
        (1, slot(9, 0), "slot-wiped", "unreachable"),
        (1, slot(9, -5), "slot-range", "unreachable"),
        (1, slot(9, 11), "slot-range", "unreachable"),
        (1, slot(9, 1 << 30), "slot-range", "unreachable"),
        (0, slot(9, lambda one: one.prev_index), "slot-old", "unreachable"),
        # Of the open file, what is not there.
        (3, slot(3, 4), "slot-behind-last", "unreachable"),
        (3, slot(3, 5), "slot-behind-last", "unreachable"),
        # A crash cut a put short: entry and slot are there, and RocketMQ's query finds it (spec 11, number 5).
        (3, header(36, ">i", 3), "header-index-count", None),
        (3, header(36, ">i", 8), "header-index-count", None),
        (1, header(0, ">q", lambda there: there + 1), "header-begin-timestamp", None),
        (1, header(8, ">q", lambda there: there + 2), "header-end-timestamp", None),
        (1, header(16, ">q", lambda there: there + (1 << 33)), "header-begin-phy-offset", None),
        (1, header(24, ">q", lambda there: there - 1), "header-end-phy-offset", None),
        (1, header(24, ">q", lambda there: there + 2), "header-end-phy-offset", None),
        (1, header(32, ">i", 0), "header-used-slot-count", None),
        (1, header(32, ">i", 100), "header-used-slot-count", None),
    ],
)
def test_a_fault(config: Config, file: int, damage: Damage, kind: str | None, lost: str | None) -> None:
    path = files_of(config)[file]
    position = damage(path)
    found = checked(config)
    assert set(found.counts) == ({kind} if kind else set())
    if kind:
        assert (found.findings[0].file, found.findings[0].position) == (f"index/{path.name}", position)
    if lost != "":
        assert (found.missing_keys > 0, found.unreachable_keys > 0) == (lost is not None, lost == "unreachable")
    assert found.unreachable_keys in (0, found.missing_keys)


def test_many_findings_are_counted_and_few_kept(tmp_path: Path) -> None:
    layout = IndexLayout(5, 2000)
    store = Store(tmp_path, layout, segment=1 << 16)
    store.append(*(spec(T0 + number, KEYS=f"k{number}") for number in range(300)))
    config = config_for(store.root, layout, 1 << 16)
    index_log(config)
    (path,) = files_of(config)
    for number in range(1, 301):
        change_entry(path, number, TIME, 9, layout)
    found = audit(config)
    assert found.counts == {"entry-time-difference": 299}
    assert [finding.text.split(":")[0] for finding in found.findings] == [f"entry {n + 2}" for n in range(NOTED_MAX)]


FILES = IndexLayout(11, 40)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Sixty messages with keys that repeat, in several segments; two full files and an open one."""
    rand = random.Random(3)
    store = Store(tmp_path_factory.mktemp("damaged"), FILES)
    for number in range(60):
        keys = " ".join(rand.choice("abcdefgh") for _ in range(rand.randrange(4)))
        store.append(spec(T0 + 700 * number, size=rand.randrange(300), KEYS=keys, TAGS=rand.choice(["s", "t"])))
    many = config_for(store.root, FILES, SEGMENT, flavour="5.4")
    index_log(many)
    assert audit(many).is_sound
    return many


def test_the_keys_that_are_missed_are_those_that_no_query_finds(many: Config) -> None:
    assert many.store.store is not None
    files = files_of(many)
    assert len(files) >= 3
    before = [path.read_bytes() for path in files]
    offsets = [frame.phy_offset for frame in naive_frames(many.store.store / "commitlog", SEGMENT)]

    @settings(max_examples=150)
    @given(damages(FILES, 3, 6), st.lists(st.sampled_from(offsets), max_size=4))
    def check(damage: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
        for path, data in zip(files, before, strict=False):
            path.write_bytes(data)
        for file, position, data in damage:
            change(files[file], position, data)
        plan = plan_audit(Disk(), many, cuts=cuts)
        found, lost = audit(many), lost_keys(many, "5.4", plan)
        holes: Counter[int] = Counter()
        for hole in found.holes:
            missed = {offset: count for offset, count in lost.items() if hole.begin <= offset < hole.end}
            assert (hole.messages, hole.keys) == (len(missed), sum(missed.values())), list(found.rows())
            holes.update(missed)
        assert holes == lost
        # However it is cut, and with files that are checked beside the comparison, which took them for sound.
        beside = [audit_task(one, Disk(), many, workers=1) for one in plan.tasks]
        assert join(plan, beside) == found

    check()


def answers_of(config: Config, samples: int = 50) -> Answers:
    answers = report_of(config, samples).answers
    assert answers is not None
    return answers


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker.sound(tmp_path)


def test_the_sample_is_spread_over_the_log(broker: Broker) -> None:
    assert 9 <= answers_of(broker.config, 10).drawn <= 10
    assert answers_of(broker.config, 1000).drawn == 90
    assert report_of(broker.config, 0).answers is None
    assert answers_of(broker.config, 10) == answers_of(broker.config, 10)


def test_what_is_in_a_hole_is_missed(broker: Broker) -> None:
    broker.files[1].unlink()
    found = answers_of(broker.config, 90)
    shares = {share["width"]: share for share in found.shares}
    assert list(shares) == list(WIDTHS)
    missed = shares["all time"]["missed"]
    assert 10 <= missed <= 20
    assert shares["minute"]["missed"] >= missed
    words = f"queries in time ranges of all time: the broker's own query misses {missed} of {found.asked} messages, "
    assert found.lines()[-1].startswith(words)
    assert found.rows()[-1] == {"kind": "samples", "drawn": found.drawn, "asked": found.asked}
