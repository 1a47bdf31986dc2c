"""The report as one object, as tables and on a terminal; and the verdict's arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from indexd.commitlog.writer import FrameSpec
from indexd.index.format import IndexLayout
from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.stats.buckets import quantile
from indexd.spark.stats.chains import FileChains
from indexd.spark.stats.chains_kernel import Kept
from indexd.spark.stats.collect import collect
from indexd.spark.stats.content import Selection
from indexd.spark.stats.parts_kernel import bucket_of
from indexd.spark.stats.report import VERSION, to_report
from indexd.spark.stats.tables import SCHEMAS, write_tables
from indexd.spark.stats.terminal import print_report
from indexd.spark.stats.verdict import NOTHING, RIGHT, TOO_FEW, TOO_MANY, judge_layout, nice
from indexd.spark.stats.wording import show_repeated
from indexd.storage.disk import Disk
from support.stats import BASE_TIME, plain_run, written_log
from support.strategies import Sample

TOPICS = ["OrderPaid", "订单主题", "[bold red]T[/]"]


def samples() -> list[Sample]:
    return [
        Sample(
            FrameSpec(
                TOPICS[number % 3],
                body=b"b" * (number * 7 % 1000),
                properties={
                    "KEYS": f"order-{number % 40} hot",
                    "UNIQ_KEY": f"u{number if number % 50 else 0}",
                    "TAGS": "t\x1b[31m",
                },
                store_timestamp=BASE_TIME + 60_000 * number - (500_000 if number == 150 else 0),
                born_host=(f"10.0.0.{number % 4}", 1),
            )
        )
        for number in range(300)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = written_log(tmp_path_factory.mktemp("log"), samples(), hash_slot_num=100, index_num=500)
    found = collect(plain_run, Disk(), log.config, Selection(), split_size=10_000, top=10)
    return json.loads(json.dumps(to_report(found)))


def test_the_object_holds_what_was_counted(report: dict[str, Any]) -> None:
    assert (report["kind"], report["version"]) == ("stats", VERSION)
    assert (report["messages"], report["keys"], report["entries"]) == (300, 600, 1200)
    hot = {(row["topic"], row["text"]): row["count"] for row in report["hotKeys"]["top"]}
    wanted = Counter((TOPICS[number % 3], key) for number in range(300) for key in (f"order-{number % 40}", "hot"))
    assert list(hot.values()) == sorted(wanted.values(), reverse=True)[:10]
    assert all(wanted[key] == count for key, count in hot.items())
    assert report["keysSeen"]["distinct"] == len(wanted)
    assert report["keysSeen"]["repeated"] == sum(count > 1 for count in wanted.values())
    assert sum(row["keys"] for row in report["keysSeen"]["byOccurrences"]) == len(wanted)
    assert {row["text"] for row in report["repeatedUniqKeys"]} == {"u0"}
    assert {row["text"]: row["count"] for row in report["hosts"]["top"]} == {f"10.0.0.{n}": 75 for n in range(4)}
    assert sum(row["messages"] for row in report["hours"]) == 300
    assert report["clock"]["steps"] == 1
    assert report["clock"]["largestSteps"][0]["ms"] == 440_000


def test_hot_keys_are_counted_again_where_they_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        Sample(
            FrameSpec("T", properties={"KEYS": " ".join(f"{number}-{i}" for i in range(90)) + " hot" * (number % 2)})
        )
        for number in range(300)
    ]
    log = written_log(tmp_path, many)
    for name in ("_CAPACITY_MIN", "_CAPACITY_MAX"):
        monkeypatch.setattr(f"indexd.spark.stats.collect.{name}", 256)
    found = collect(plain_run, Disk(), log.config, Selection(), split_size=50_000, top=3)
    quick = collect(plain_run, Disk(), log.config, Selection(), split_size=50_000, top=3, quick=True)
    assert found.keys.is_exact
    assert (found.keys.named[0].count, found.keys.named[0].text and found.keys.named[0].text.text) == (150, "hot")
    assert 0 < found.keys.complete_above < 150
    assert found.keys.distinct is None
    assert not quick.keys.is_exact
    assert quick.index is None
    assert 150 - quick.keys.complete_above <= quick.keys.named[0].count <= 150


def test_tables_are_read_by_pandas_and_duckdb(report: dict[str, Any], tmp_path: Path) -> None:
    written = write_tables(report, Disk(), tmp_path / "tables")
    assert {path.stem for path in written} == set(SCHEMAS)
    for path in written:
        assert parquet.read_schema(path).metadata[b"indexd.stats"] == str(VERSION).encode()
        assert parquet.read_schema(path).equals(SCHEMAS[path.stem])
    hours = pd.read_parquet(tmp_path / "tables" / "topic_hours.parquet")
    assert hours["messages"].sum() == 300
    assert hours["hour"].min() == pd.Timestamp(BASE_TIME // 3_600_000 * 3_600_000, unit="ms", tz="UTC")
    with duckdb.connect() as connection:
        keys = str(tmp_path / "tables" / "keys.parquet")
        rows = connection.execute(f"select kind, sum(count) from '{keys}' where kind = 'host' group by kind").fetchall()
        assert rows == [("host", 300)]
        chains = str(tmp_path / "tables" / "chains.parquet")
        assert connection.execute(f"select sum(entries) from '{chains}'").fetchall() == [(1200,)]
    # Again, over what is there.
    assert len(write_tables(report, Disk(), tmp_path / "tables")) == len(written)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_no_markup_and_no_control_character(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_report(report, 10)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for line in shown.splitlines():
        assert line == line.rstrip()
    if width >= 80:
        assert "[bold red]T[/]" in shown
        assert "t\\x1b[31m" in shown
        assert "step back" in shown
        assert "订单主题" in shown


def files(entries: int, hash_slot_num: int, hashes: np.ndarray[Any, Any] | None = None) -> list[FileChains]:
    """One file of so many entries; of its kept entries only the hashes matter."""
    if hashes is None:
        hashes = np.random.default_rng(1).integers(0, 2**31, entries).astype(np.uint32)
    counts = np.bincount(hashes % hash_slot_num, minlength=hash_slot_num)
    lengths = np.zeros((2, 124), dtype=np.int64)
    for length, slots in Counter(counts.tolist()).items():
        lengths[:, int(bucket_of(np.uint64(length)))] += (slots, slots * length)
    nothing = np.zeros(entries, dtype=np.int64)
    kept = Kept(nothing.astype(np.int32), hashes, nothing.astype(np.uint64), nothing, nothing)
    squares = float((counts.astype(float) ** 2).sum())
    return [FileChains(0, entries, lengths, squares, int(counts.max()), 0, 0, 0, 0, 0, kept, ())]


@pytest.mark.parametrize(
    ("entries", "slots", "answer", "recommended"),
    [
        (19_999, 5000, RIGHT, 5000),
        (19_999, 2000, TOO_FEW, 5000),
        (19_999, 20_000, RIGHT, 5000),
        (19_999, 200_000, TOO_MANY, 5000),
    ],
)
def test_the_verdict_is_rocketmqs_own_ratio(entries: int, slots: int, answer: str, recommended: int) -> None:
    found = judge_layout(files(entries, slots), IndexLayout(slots, entries + 1), 0)
    assert (found.answer, found.recommended) == (answer, recommended)
    assert found.spread == pytest.approx(1, abs=0.1)
    assert found.strangers == pytest.approx(entries / slots, rel=0.1)


def test_hashes_that_crowd_ask_for_more_slots() -> None:
    # All are multiples of 8, and so is the number of slots: seven in eight stay empty.
    hashes = (np.random.default_rng(1).integers(0, 2**27, 20_000) * 8).astype(np.uint32)
    found = judge_layout(files(20_000, 8000, hashes), IndexLayout(8000, 20_001), 0)
    assert found.spread == pytest.approx(8, rel=0.1)
    assert found.answer == TOO_FEW
    assert found.recommended == 50_000
    assert any("crowd" in words for words in found.words)


def test_one_key_alone_asks_for_no_slots() -> None:
    hashes = np.full(20_000, 77, dtype=np.uint32)
    found = judge_layout(files(20_000, 5000, hashes), IndexLayout(5000, 20_001), 0)
    assert found.answer == RIGHT
    assert any("no number of slots" in words for words in found.words)
    assert found.walk == 20_000


def test_nothing_to_index_is_said() -> None:
    assert judge_layout([], IndexLayout(5000, 20_000), 0).answer == NOTHING


def test_recommended_numbers_are_round() -> None:
    assert [nice(value) for value in (0, 1000, 1001, 4_999_999.75, 5_000_001)] == [
        1000,
        1000,
        2000,
        5_000_000,
        10_000_000,
    ]


def test_a_quantile_is_its_buckets_upper_bound() -> None:
    counts = np.zeros(124, dtype=np.int64)
    assert quantile(counts, 0.5) == 0
    counts[3], counts[8] = 10, 10
    assert [quantile(counts, share) for share in (0.5, 0.51, 1.0)] == [3, 9, 9]


def test_words() -> None:
    assert [show_number(value) for value in (0, 754_345, 4_560_000, 1.2e9, 999_999_999)] == [
        "0", "754,345", "4.56 M", "1.2 G", "1 G",
    ]  # fmt: skip
    assert [show_share(value) for value in (None, 0, 1, 0.0001, 0.99999, 0.123)] == [
        "not known", "0%", "100%", "< 0.1 %", "> 99.9 %", "12.3 %",
    ]  # fmt: skip
    assert [show_duration(value) for value in (5, 1480, 92_983, 90_000_000)] == [
        "5 ms",
        "1.48 s",
        "1 min 32 s",
        "1 d 1 h",
    ]
    assert [show_size(value) for value in (0, 1023, 1 << 20, 433_000_000)] == ["0 B", "1023 B", "1 MiB", "413 MiB"]
    assert show_utc(0) == "1970-01-01 00:00"
    assert show_utc(1 << 62).endswith(" ms")
    assert show_utc(-1, seconds=True) == "1969-12-31 23:59:59.999"
    assert show_name("a\nb\u202ec") == "a\\nb\\u202ec"
    assert len(show_name("x" * 500)) == 120


@pytest.mark.parametrize(
    ("is_exact", "repeated", "known", "words"),
    [(True, 0, 0, "0"), (True, 7, 7, "7"), (False, 400, 40, "about 400"), (False, 0, 40, "at least 40")],
)
def test_a_sample_never_denies_a_repeat_that_is_known(is_exact: bool, repeated: int, known: int, words: str) -> None:
    assert show_repeated({"isExact": is_exact, "repeated": repeated}, {"repeatedAtLeast": known}) == words
