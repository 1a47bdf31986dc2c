"""Statistics without Spark, against plain Python; and exports that cannot be asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.cli.main import main
from indexd.config.units import parse_place
from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.export import hadoop_uri
from indexd.spark.stats.content import TEXTS, Selection, bucket_begins, bucket_end, largest, step_for
from indexd.spark.stats.index import NOTHING, RIGHT, TOO_FEW, TOO_MANY, judge_index
from indexd.spark.stats.report import Report
from indexd.spark.stats.show import print_report, render_page
from support.commitlog_writer import FrameSpec
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
@given(logs(malformed=False), st.integers(1, 4000), st.sampled_from(["5.4", "4.7", "3.x"]))
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


@pytest.mark.parametrize("split_size", [1, 200, 100_000])
def test_steps_and_silences_are_found(tmp_path: Path, split_size: int) -> None:
    times = [0, 10, 5, 5, 70_006, 70_006, -50, 60_000]
    log = written_log(tmp_path, [Sample(FrameSpec("T", store_timestamp=BASE_TIME + time)) for time in times])
    splits = counts_of(log, split_size).splits
    size = log.sizes[0]
    if len(splits) == 1:
        assert splits[0]["largestSteps"] == [
            [6 * size, BASE_TIME + 70_006, BASE_TIME - 50], [2 * size, BASE_TIME + 10, BASE_TIME + 5],
        ]  # fmt: skip
        assert [after - before for _, before, after in splits[0]["largestSilences"]] == [70_001, 60_050]
    least, greatest = (choose(split["times"][at] for split in splits) for choose, at in ((min, 2), (max, 3)))
    assert (least, greatest) == (BASE_TIME - 50, BASE_TIME + 70_006)


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


class Elements(HTMLParser):
    """Every element's name and attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words.append(data)


def test_what_the_log_says_stays_text_and_the_page_asks_for_nothing() -> None:
    elements = Elements(render_page(hostile_report(), 20))
    names = Counter(name for name, _ in elements.found)
    assert not set(names) & {"img", "a", "iframe", "link", "object", "form", "input", "script"}
    assert names["svg"] == 1, "the page's own"
    assert not [n for _, attributes in elements.found for n in attributes if n.startswith("on") or n in ("src", "href")]
    words = " ".join(elements.words)
    for name in HOSTILE[:8]:
        assert name in words
    assert "\\u202egnp.exe" in words
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy") or ""
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "script-src" not in rules
    assert "http" not in policy


def test_the_page_shows_times_and_the_clock_and_stays_small() -> None:
    report = hostile_report()
    page = render_page(report, 20)
    assert page.count('class="column"') == 40
    assert page.count('class="step"') == 1
    assert page.count('class="silence"') == 1
    assert "clock back" in page
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
    assert all(line == line.rstrip() for line in shown.splitlines())
    if width >= 80:
        for words in ("[bold red]T[/]", "t\\x1b[31m", "step back", "订单主题", "5,000 slots are right", "█"):
            assert words in shown


def empty_report(**changes: Any) -> Report:
    nothing = {"messages": 0, "topics": [], "hours": [], "bins": {"stepMs": 1000, "rows": []}}
    return hostile_report() | nothing | changes


def test_of_an_empty_log_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no message" in render_page(empty_report(), 20)
    print_report(empty_report(firstStoreTimestamp=None, unreadableAt=77, skippedBytes=2048), 20)
    shown = capsys.readouterr().out
    assert "There is no message" in shown
    assert "2 KiB of the log were passed over" in shown
    assert "at offset 77 in bytes that are no frame" in shown


def test_json_has_the_names_of_the_interface() -> None:
    found = hostile_report()
    assert (found["kind"], found["version"]) == ("stats", 4)
    assert {"beginOffset", "firstStoreTimestamp", "withoutAnyKey", "keysSeen", "hotUniqKeys", "bodySizes"} <= set(found)


def test_words() -> None:
    numbers = [show_number(value) for value in (0, 754_345, 4_560_000, 1.2e9, 999_999_999)]
    assert numbers == ["0", "754,345", "4.56 M", "1.2 G", "1 G"]
    shares = [show_share(value) for value in (None, 0, 1, 0.0001, 0.99999, 0.123)]
    assert shares == ["not known", "0%", "100%", "< 0.1 %", "> 99.9 %", "12.3 %"]
    durations = [show_duration(value) for value in (5, 1480, 92_983, 90_000_000)]
    assert durations == ["5 ms", "1.48 s", "1 min 32 s", "1 d 1 h"]
    assert [show_size(value) for value in (0, 1023, 1 << 20, 433_000_000)] == ["0 B", "1023 B", "1 MiB", "413 MiB"]
    assert show_utc(0) == "1970-01-01 00:00"
    assert show_utc(1 << 62).endswith(" ms")
    assert show_utc(-1, seconds=True) == "1969-12-31 23:59:59.999"
    assert show_name("a\nb\u202ec") == "a\\nb\\u202ec"
    assert len(show_name("x" * 500)) == 120


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, text: str
) -> None:
    store, file = tmp_path / "store", tmp_path / "file"
    write_log(store, 10)
    file.touch()
    given = ["export", "--store", str(store), "--data", str(tmp_path / "data"), "--to", str(tmp_path / "out")]
    with (
        mock.patch("indexd.cli.jobs.spark_session", side_effect=AssertionError("a session")),
        pytest.raises(SystemExit) as ended,
    ):
        main([*given, *(flag.replace("STORE", str(store)).replace("FILE", str(file)) for flag in flags)])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (code, 1)
    assert text in said
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
