"""Compiled answers to key queries: the plain ones on hot keys, logs that grow and hostile files, or none."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX
from indexd.query.broker_message import query_message
from support.data_directory import SEGMENT, T0, Store, spec
from support.page_cache import forget
from support.remoting_asking import ANY_SIZE, COMPILED, Judge, by_key, damage, frames

LARGE = IndexLayout(101, 1000)


def test_a_hot_key_in_many_files_and_segments(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(7, 40), segment=1 << 16)
    store.append(*[spec(T0 + 500 * number, KEYS=f"k other-{number}", size=number * 37 % 7000) for number in range(120)])
    store.build()
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key())
        for request in (
            by_key(),
            by_key(max_num=0),
            by_key(max_num=1),
            by_key(max_num=1 << 30),
            by_key(begin=T0 + 10_000, end=T0 + 30_500),
            by_key(end=T0),
            by_key(begin=T0 + 59_500),
            *[by_key(f"other-{number}") for number in range(120)],
            by_key("absent"),
        ):
            judge.ask(request)
        assert frames(judge.ask(by_key())) == 64
        assert judge.answered[COMPILED] > 60
        for size_max in (100, 10_000, 100_000, 200_000):
            judge.ask(by_key(), size_max)


def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(3, 5), segment=1 << 16)
    sent, compiled = 0, []
    for count in (200, 100):
        store.append(*[spec(T0 + 500 * number, KEYS=f"k-{number}") for number in range(sent, sent + count)])
        sent += count
        store.build()
        with store.index() as index:
            judge = Judge(index)
            for number in range(0, sent, 7):
                assert frames(judge.ask(by_key(f"k-{number}"))) == 1
            compiled.append(judge.answered[COMPILED])
            assert len(index.look().files) == (50 if count == 200 else 75)
    assert compiled[0] > 20
    assert compiled[1] == 0


def test_a_long_walk_is_left_to_who_may_take_time(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(1, 12_000), segment=1 << 20)
    keys = [" ".join(f"k-{number}-{piece}" for piece in range(10)) for number in range(1100)]
    store.append(*[spec(T0 + number, KEYS=text) for number, text in enumerate(keys)])
    store.build()
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key("k-1099-0"))
        judge.answered.clear()
        assert frames(judge.ask(by_key("k-110-0", 1))) == 1  # behind 9,900 others
        assert judge.answered == {COMPILED: 1}
        assert frames(judge.ask(by_key("k-90-0", 1))) == 1
        assert frames(judge.ask(by_key("absent"))) == 0
        assert judge.answered == {COMPILED: 1, "left": 1}


def write_word(store: Store, position: int, value: int) -> None:
    """Into the only index file."""
    (path,) = (store.data / "index").iterdir()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(value.to_bytes(4, "big"))


def test_a_chain_in_a_circle_can_be_ended(tmp_path: Path) -> None:
    layout = IndexLayout(1, 3000)
    store = Store(tmp_path, layout, segment=1 << 20)
    store.append(*[spec(T0 + number, KEYS=f"k-{number}") for number in range(2000)])
    store.build()
    write_word(store, 36, 2**31 - 1)
    # From 10 back to 11, and so on: all of it comes with one read.
    write_word(store, layout.entry_position(10) + 16, 11)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 1000:
            raise TimeoutError

    with store.index() as index:
        judge = Judge(index)
        index.log.check = check
        assert judge.compiled(by_key()) is None
        assert checks < 100
        with pytest.raises(TimeoutError):
            query_message(index, by_key("absent"), ANY_SIZE)


def test_a_chain_that_goes_up_is_counted_by_the_plain_way(tmp_path: Path) -> None:
    layout = IndexLayout(1, 40)
    store = Store(tmp_path, layout, segment=1 << 16)
    store.append(*[spec(T0 + 1000 * number) for number in range(4)])
    store.build()
    write_word(store, layout.entry_position(2) + 16, 3)
    with store.index() as index:
        judge = Judge(index)
        for _ in range(2):
            assert frames(judge.ask(by_key())) > 4
        assert judge.answered[COMPILED] == 0


def test_a_segment_beyond_all_offsets(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    store.append(*[spec(T0 + number) for number in range(3)])
    store.build()
    path, *others = sorted((store.root / "commitlog").iterdir())
    for other in others:
        other.unlink()
    path.rename(path.with_name(f"{1 << 63:020d}"))
    with store.index() as index:
        judge = Judge(index)
        for _ in range(3):
            assert frames(judge.ask(by_key())) == 0


def test_a_log_that_grows(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE, segment=1 << 16)
    store.append(*[spec(T0 + number, size=1000) for number in range(6)])
    store.build()
    with store.index() as index:
        judge = Judge(index)
        for number in range(6, 20):
            assert frames(judge.ask(by_key())) == number
            store.append(spec(T0 + number, size=1000))
            store.build()
        assert judge.answered[COMPILED] > 5


def test_what_has_expired_is_said_by_the_plain_way(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    store.append(*[spec(T0 + number, size=1000) for number in range(12)])
    store.build()
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key())
        (store.root / "commitlog" / f"{0:020d}").unlink()
        found = judge.ask(by_key())
        assert not isinstance(found, str)
        assert found.remark is not None
        assert found.remark.endswith(" expired")
        damage(store, SEGMENT * 2)
        judge.ask(by_key())


def test_hostile_index_files(tmp_path: Path) -> None:
    """Any bytes: the same answer, the same complaint, and no read beyond a buffer."""
    store = Store(tmp_path, IndexLayout(11, 60))
    store.append(*[spec(T0 + 700 * number, KEYS=f"k other-{number % 9}") for number in range(50)])
    store.build()
    files = sorted((store.data / "index").iterdir())
    good, rand, answered = [path.read_bytes() for path in files], random.Random(5), Counter[str]()
    for _ in range(150):
        for path, content in zip(files, good, strict=True):
            bad = bytearray(content)
            for _ in range(rand.choice([1, 3, 30])):
                # The header is 40 bytes, the slots 44, the entries 1200.
                at = rand.choice([rand.randrange(40), 40 + rand.randrange(44), 84 + rand.randrange(1200)])
                bad[at] = rand.choice([0, 1, 0x7F, 0x80, 0xFF, rand.randrange(256)])
            path.write_bytes(bad)
        with store.index() as index:
            judge = Judge(index)
            for key in ("k", "other-1", "absent"):
                judge.ask(by_key(key, rand.choice([1, 3, 64]), rand.choice([0, T0 + 9000]), TIME_MAX))
            answered += judge.answered
    assert answered[COMPILED] > 20


def test_nothing_is_waited_for(disk_path: Path) -> None:
    store = Store(disk_path, LARGE)
    store.append(*[spec(T0 + number, size=50) for number in range(3)])
    store.build()
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key())
        judge.ask(by_key())
        assert judge.answered[COMPILED] > 0
        for path in ((store.root / "commitlog").iterdir(), (store.data / "index").iterdir()):
            judge.answered.clear()
            for one in path:
                forget(one)
            found, wanted = judge.compiled(by_key()), judge.ask(by_key())
            assert not isinstance(wanted, str)
            assert found is None or found[1] == b"".join(wanted.frames)
