"""The broker's query on its own files: what RocketMQ answered, on damaged files what the naive twin does."""

from __future__ import annotations

import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import plan_audit
from indexd.audit.samples import broker_query
from indexd.audit.samples.answers import WIDTHS
from indexd.audit.samples.asking import range_around
from indexd.audit.samples.broker_query import TIME_MAX, BrokerFiles, BrokerQuery
from indexd.index.format import IndexLayout, index_key_hash
from indexd.storage.disk import Disk
from support.auditing import config_for, config_of_golden, index_log
from support.goldens import GOLDENS, unpack
from support.naive import key_hash
from support.sampling import (
    LAYOUT,
    asked,
    naive_service,
    rows_of_log,
    shares_of,
    store_of,
)
from support.small_log import SEGMENT_SIZE, write_log

TINY = IndexLayout(7, 60)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_broker_s_query_gives_every_answer_that_rocketmq_gave(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    config = config_of_golden(golden)
    layout = IndexLayout(golden.hash_slot_num, golden.index_num)
    files = BrokerFiles(Disk(), plan_audit(Disk(), config), layout)
    for row in golden.answers():
        is_tag = row.get("indexType") == "T" and golden.flavour == "5.4"
        hashed = index_key_hash(row["topic"], row["key"], "T" if is_tag else None)
        search = BrokerQuery(files, hashed)
        assert search.query(row["begin"], row["end"], min(row["max"], 64)) == row["phyOffsets"], row
    files.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A log of 150 messages, and many small files with few slots; not to be changed. With the messages."""
    store = tmp_path_factory.mktemp("tiny") / "store"
    write_log(store, 150)
    config = config_for(store, TINY, SEGMENT_SIZE)
    index_log(config)
    return store, rows_of_log(config)


plants = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.one_of(
            st.tuples(st.just("slot"), st.integers(0, TINY.hash_slot_num - 1), st.integers(-2, TINY.index_num + 3)),
            st.tuples(st.just("previous"), st.integers(1, TINY.index_num - 1), st.integers(-1, TINY.index_num + 3)),
            st.tuples(st.just("seconds"), st.integers(1, TINY.index_num - 1), st.integers(-3, 200)),
            st.tuples(st.just("begin"), st.just(0), st.integers(-200, 200)),
            st.tuples(st.just("end"), st.just(0), st.integers(-200, 200)),
            st.tuples(st.just("count"), st.just(0), st.integers(0, TINY.index_num)),
        ),
    ),
    max_size=12,
)


def plant(path: Path, kind: str, number: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    if kind == "slot":
        struct.pack_into(">i", data, TINY.slot_position(number), value)
    elif kind == "previous":
        # Downwards or nowhere: Java goes round a loop for ever.
        value = value % number if 0 < value <= TINY.index_num else value
        struct.pack_into(">i", data, TINY.entry_position(number) + 16, value)
    elif kind == "seconds":
        struct.pack_into(">i", data, TINY.entry_position(number) + 12, value)
    elif kind == "count":
        struct.pack_into(">i", data, 36, value)
    else:
        at = 0 if kind == "begin" else 8
        struct.pack_into(">q", data, at, struct.unpack_from(">q", data, at)[0] + 100 * value)
    path.write_bytes(data)


@settings(max_examples=40, deadline=None)
@given(plants=plants, asked_for=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(list(WIDTHS))), min_size=8))
def test_the_broker_s_query_is_the_naive_one_on_damaged_files(
    tiny: tuple[Path, list[dict[str, Any]]],
    plants: list[tuple[int, tuple[str, int, int]]],
    asked_for: list[tuple[int, str]],
) -> None:
    original, rows = tiny
    with tempfile.TemporaryDirectory() as folder:
        store = Path(shutil.copytree(original, Path(folder) / "store"))
        files = sorted((store / "index").iterdir())
        for file, one in plants:
            plant(files[file % len(files)], *one)
        config = config_for(store, TINY, SEGMENT_SIZE)
        naive = naive_service(config, "5.4")
        opened = BrokerFiles(Disk(), plan_audit(Disk(), config), TINY)
        for number, width in asked_for:
            row = rows[number % len(rows)]
            begin, end = range_around(row["storeTimestamp"] + number % 3000 - 1500, WIDTHS[width])
            for key in ("Aa", row["uniqKey"] or ""):
                hashed = key_hash(f"{row['topic']}#{key}")
                for most in (2, 64):
                    expected, _, _ = naive.query_offset(row["topic"], key, most, begin, end)
                    assert BrokerQuery(opened, hashed).query(begin, end, most) == expected
        opened.close()


def test_an_entry_that_the_header_does_not_count_yet_is_found(tmp_path: Path) -> None:
    # Entry and slot are written, the header is not: what a put leaves that a crash cut short.
    config = store_of(tmp_path, [(0, "a"), (5000, "b"), (9000, "c")])
    (path,) = (tmp_path / "store" / "index").iterdir()
    with path.open("r+b") as file:
        file.seek(36)
        file.write(struct.pack(">i", 3))
    files = BrokerFiles(Disk(), plan_audit(Disk(), config), LAYOUT)
    answers = [BrokerQuery(files, key_hash(f"T#{key}")).query(0, TIME_MAX, 64) for key in "abc"]
    files.close()
    assert answers == [[row["phyOffset"]] for row in rows_of_log(config)]


def test_chains_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = store_of(tmp_path, [(number, f"k{number}") for number in range(50)], IndexLayout(1, 2000))
    assert asked(config).long == 0
    monkeypatch.setattr(broker_query, "_STEPS_MAX", 20)
    assert asked(config).long == 50
    (path,) = (tmp_path / "store" / "index").iterdir()
    with path.open("r+b") as file:
        file.seek(IndexLayout(1, 2000).entry_position(40) + 16)
        file.write(struct.pack(">i", 50))  # up again: a loop, in which Java stays
    monkeypatch.undo()
    assert shares_of(asked(config))["all time"].hole == 39
