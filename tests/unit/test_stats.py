"""Statistics without Spark, against plain Python; and exports that cannot be asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from indexd.config.units import parse_place
from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.export import hadoop_uri
from indexd.spark.stats.report import (
    NOTHING,
    RIGHT,
    TEXTS,
    TOO_FEW,
    TOO_MANY,
    Selection,
    bucket_begins,
    bucket_end,
    judge_index,
    largest,
    step_for,
)
from indexd.spark.stats.show import print_report, render_page
from support.commitlog_writer import FrameSpec
from support.daemon import indexd_here
from support.small_log import write_log
from support.stats import (
    BASE_TIME,
    HOSTILE,
    counts_of,
    hostile_report,
    naive_clock,
    naive_counts,
    written_log,
)
from support.strategies import Sample, logs

# --- content ---


@settings(max_examples=15)
@given(logs(malformed=False), st.integers(200, 4000), st.sampled_from(["5.4", "4.7", "3.x"]))
def test_the_rows_of_all_splits_are_what_the_decoder_sees(samples: list[Sample], split_size: int, flavour: str) -> None:
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples, flavour=flavour)
        found = counts_of(log, split_size)
        amounts, firsts = naive_counts(log)
        clock = naive_clock(log)
        entries = len(log.entries())
    assert +found.amounts == amounts
    assert {place: first for place, first in found.firsts.items() if place[0] in TEXTS} == firsts
    assert sum(split["entries"] for split in found.splits) == entries
    times = [split["times"] for split in found.splits if split["times"]]
    between = list(itertools.pairwise(times))
    assert clock == (
        sum(split["steps"] for split in found.splits) + sum(b[0] < a[1] for a, b in between),
        sum(split["silences"] for split in found.splits) + sum(b[0] - a[1] > 60_000 for a, b in between),
    )


def test_topics_and_times_are_selected(tmp_path: Path) -> None:
    samples = [
        Sample(FrameSpec("T" if n % 3 else "Other", properties={"KEYS": "k"}, store_timestamp=BASE_TIME + 1000 * n))
        for n in range(60)
    ]
    log = written_log(tmp_path, samples)
    found = counts_of(log, 1000, Selection(("T",), BASE_TIME + 10_000, BASE_TIME + 19_000))
    messages = {place[1]: amount for place, amount in found.amounts.items() if place[0] == "messages"}
    assert messages == {"T": sum(n % 3 > 0 for n in range(10, 20))}
    # The index has all topics and times in it, whatever is looked at.
    assert sum(split["entries"] for split in found.splits) == 60


def test_the_largest_events_are_kept() -> None:
    found = largest((number, 0, number % 150) for number in range(300))
    assert len(found) == 100
    assert found[:3] == [(149, 0, 149), (299, 0, 149), (148, 0, 148)]


@given(st.lists(st.integers(0, 1 << 40), min_size=1))
def test_buckets_grow_by_a_quarter(values: list[int]) -> None:
    for value, begin in zip(values, bucket_begins(np.array(values)).tolist(), strict=True):
        assert begin <= value <= bucket_end(begin)
        assert bucket_end(begin) - begin <= begin / 4
        assert int(bucket_begins(np.array([bucket_end(begin) + 1]))[0]) == bucket_end(begin) + 1


def test_bins_fit_the_time_that_a_log_spans() -> None:
    assert [step_for(span) for span in (0, 119_999, 120_000, 24 * 3_600_000)] == [1000, 1000, 5000, 900_000]
    assert (1 << 62) // step_for(1 << 62) < 120


# --- index ---


@pytest.mark.parametrize(
    ("entries", "slots", "answer", "recommended"),
    [
        (19_999, 5000, RIGHT, 5000),
        (19_999, 2000, TOO_FEW, 5000),
        (19_999, 20_000, RIGHT, 5000),
        (90_000, 200_000, TOO_MANY, 5000),
        (0, 5000, NOTHING, 5000),
    ],
)
def test_the_verdict_is_rocketmqs_own_ratio(entries: int, slots: int, answer: str, recommended: int) -> None:
    found = judge_index(entries, slots, 20_000)
    assert (found["verdict"]["answer"], found["verdict"]["recommendedSlots"]) == (answer, recommended)
    assert (found["entries"], found["files"]) == (entries, -(-entries // 19_999))


# --- what is shown ---


def test_the_page_shows_names_times_and_the_clock_and_stays_small() -> None:
    report = hostile_report()
    page = render_page(report, 20)
    for name in HOSTILE[:8]:
        assert str(escape(name)) in page
        assert name not in page or not set(name) & set("<>\"'&")
    assert "\\u202egnp.exe" in page
    counts = [page.count(f'class="{name}"') for name in ("column", "step", "silence")]
    assert (counts, "clock back" in page) == ([40, 1, 1], True)
    rows = [
        {"topic": f"Topic{n % 30}", "begin": BASE_TIME + 3_600_000 * (n // 30), "messages": n} for n in range(72_000)
    ]
    topics = [report["topics"][0] | {"topic": f"Topic{n}"} for n in range(1000)]
    large = report | {"bins": {"stepMs": 3_600_000, "rows": rows}, "topics": topics}
    assert len(render_page(large, 1000).encode()) < 500_000


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_no_markup_and_no_control_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_report(hostile_report(), 10)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= width
    if width >= 80:
        for words in ("[bold red]T[/]", "t\\x1b[31m", "step back", "订单主题", "5,000 slots are right"):
            assert words in shown


def test_of_an_empty_log_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"messages": 0, "topics": [], "hours": [], "bins": {"stepMs": 1000, "rows": []}}
    report = hostile_report() | nothing | {"firstStoreTimestamp": None, "unreadableAt": 77, "skippedBytes": 2048}
    print_report(report, 20)
    shown = capsys.readouterr().out
    assert "There is no message" in render_page(report, 20)
    for words in (
        "There is no message",
        "2 KiB of the log were passed over",
        "at offset 77 in bytes that are no frame",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (map(show_number, (0, 754_345, 4_560_000, 1.2e9, 999_999_999)), ["0", "754,345", "4.56 M", "1.2 G", "1 G"]),
        (
            map(show_share, (None, 0, 1, 0.0001, 0.99999, 0.123)),
            ["not known", "0%", "100%", "< 0.1 %", "> 99.9 %", "12.3 %"],
        ),
        (map(show_duration, (5, 1480, 92_983, 90_000_000)), ["5 ms", "1.48 s", "1 min 32 s", "1 d 1 h"]),
        (map(show_size, (0, 1023, 1 << 20, 433_000_000)), ["0 B", "1023 B", "1 MiB", "413 MiB"]),
        ([show_utc(0), show_utc(-1, seconds=True)], ["1970-01-01 00:00", "1969-12-31 23:59:59.999"]),
        ([show_utc(1 << 62)[-3:], show_name("a\nb\u202ec"), len(show_name("x" * 500))], [" ms", "a\\nb\\u202ec", 120]),
    ],
)
def test_words(shown: Iterable[object], expected: list[object]) -> None:
    assert list(shown) == expected


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--columns", "phyOffset,nothing"], 2, "no column 'nothing'"),
        (["--topics", "A,,B"], 2, "names nothing"),
        (["--topics", "A,"], 2, "names nothing"),
        (["-b", "2", "-e", "1"], 2, "is behind the last one"),
        (["--max-records-per-file", "-1"], 2, "is not from 0 to"),
        (["--partition-by", "hour"], 2, "hour is no partition"),
        (["--partition-by", "day,day"], 2, "given twice"),
        (["--columns", "topic", "--partition-by", "topic"], 2, "no column is left"),
        (["--mode", "replace"], 2, "replace"),
        (["--to", "ftp://h/x"], 2, "no place"),
        (["--to", "s3://key:secret@b/x"], 2, "s3://***@b/x holds options; give them to Hadoop"),
        (["--to", "STORE/x"], 3, "inside the store"),
        (["--to", "FILE"], 2, "is a file"),
        (["--store", "/nowhere"], 3, "no directory"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_before_anything_starts(
    tmp_path: Path, flags: list[str], code: int, text: str
) -> None:
    store, file = tmp_path / "store", tmp_path / "file"
    write_log(store, 10)
    file.touch()
    given = ["export", "--store", store, "--data", tmp_path / "data", "--to", tmp_path / "out"]
    given += [flag.replace("STORE", str(store)).replace("FILE", str(file)) for flag in flags]
    with mock.patch("indexd.cli.jobs.spark_session", side_effect=AssertionError("a session")):
        done = indexd_here(*given)
    assert (done.returncode, done.stderr.count("\n"), text in done.stderr) == (code, 1, True), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ("s3://bucket/a%20b/c", "s3a://bucket/a b/c"),
        ("hdfs://head:8020/x", "hdfs://head:8020/x"),
        ("file:///a%20b", "file:/a b"),
        ("/a b/%2F", "file:/a b/%2F"),
    ],
)
def test_places_are_named_as_hadoop_does(place: str, uri: str) -> None:
    assert hadoop_uri(parse_place(place)) == uri
