"""The statistics on Spark: every figure against plain Python, however the log is split; the command, and its page."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from pyspark.sql import SparkSession

from indexd.spark.stats.report import MEASURES, Report, Selection, collect
from indexd.spark.stats.show import write_page
from indexd.storage.disk import Disk
from support.browser import Page, requires_chromium
from support.commitlog_writer import FrameSpec
from support.daemon import indexd_here
from support.small_log import messages
from support.stats import SEGMENT_SIZE, Log, hostile_report, naive_clock, naive_counts, written_log
from support.strategies import Sample

COUNT = 800


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    samples = [Sample(spec) for spec in islice(messages(3), COUNT)]
    return written_log(tmp_path_factory.mktemp("log"), samples, hash_slot_num=300, index_num=800)


def report_of(spark: SparkSession, log: Log, split_size: int, selection: Selection, **options: Any) -> Report:
    spark_config = log.config.spark.model_copy(update={"split_size": split_size})
    config = log.config.model_copy(update={"spark": spark_config})
    return collect(spark, config, selection, **options)


def naive_hot(log: Log, kind: str, top: int, least: int = 1) -> list[dict[str, Any]]:
    amounts, firsts = naive_counts(log)
    rows = sorted((-amount, firsts[place], *place[1:3]) for place, amount in amounts.items() if place[0] == kind)
    return [
        {"topic": topic, "text": text, "count": -amount, "phyOffset": first}
        for amount, first, topic, text in rows[:top]
        if -amount >= least
    ]


def check_contents(found: Report, log: Log, top: int) -> None:
    """Everything but the distinct keys and the index."""
    amounts, _ = naive_counts(log)
    for name in MEASURES:
        by_hour = {(topic, at): amount for (kind, topic, _, at), amount in amounts.items() if kind == name}
        by_topic: Counter[str] = Counter()
        for (topic, _), amount in by_hour.items():
            by_topic[topic] += amount
        assert found[name] == by_topic.total()
        assert {(row["topic"], row["hour"]): row[name] for row in found["hours"] if row[name]} == by_hour
        assert {row["topic"]: row[name] for row in found["topics"]} == by_topic
    bins = Counter((message.topic, message.store_timestamp // 1000 * 1000) for message in log.messages())
    assert found["bins"]["stepMs"] == 1000
    assert {(r["topic"], r["begin"]): r["messages"] for r in found["bins"]["rows"]} == bins
    sizes = {at: amount for (kind, *_, at), amount in amounts.items() if kind == "size"}
    assert {r["from"]: r["messages"] for r in found["bodySizes"]["buckets"]} == sizes
    assert sum(r["bytes"] for r in found["bodySizes"]["buckets"]) == found["bodyBytes"]
    types = Counter(message.sys_flag & 0xC for message in log.messages())
    assert list(found["transactions"].values()) == [types[kind] for kind in (0, 4, 8, 12)]
    for shown, kind in ((found["hotKeys"], "KEYS"), (found["tags"], "TAGS"), (found["hosts"], "host")):
        assert shown["top"] == naive_hot(log, kind, top)
        assert shown["isExact"]
    assert found["hotUniqKeys"]["top"] == naive_hot(log, "UNIQ_KEY", top, 2)
    assert (found["clock"]["steps"], found["clock"]["silences"]) == naive_clock(log, 30_000)
    times = [message.store_timestamp for message in log.messages()]
    steps = sorted(a - b for a, b in itertools.pairwise(times) if b < a)[::-1]
    assert [event["ms"] for event in found["clock"]["largestSteps"]] == steps
    assert (found["firstStoreTimestamp"], found["lastStoreTimestamp"]) == (min(times), max(times))


def test_a_report_is_what_plain_python_counts(spark: SparkSession, log: Log) -> None:
    told: list[tuple[int, int]] = []
    selection = Selection(silence=30_000)
    found = report_of(spark, log, 30_000, selection, top=5, progress=lambda *done: told.append(done))
    check_contents(found, log, 5)
    amounts, _ = naive_counts(log)
    keys = Counter(amount for place, amount in amounts.items() if place[0] == "KEYS")
    seen, repeated = found["keysSeen"], keys.total() - keys[1]
    assert (seen["distinct"], seen["isExact"], seen["repeated"]) == (keys.total(), True, repeated)
    assert found["hotKeys"]["repeatedAtLeast"] == repeated
    assert [row["keys"] for row in seen["byOccurrences"]] == [
        sum(texts for times, texts in keys.items() if row["from"] <= times <= (row["to"] or times))
        for row in seen["byOccurrences"]
    ]
    assert found["index"]["entries"] == len(log.entries())
    assert told[-1] == told[-1][::-1]


def test_times_that_are_too_many_are_not_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    times = [-(2**62), *(3_600_000 * n for n in range(40)), 2**62]
    log = written_log(tmp_path, [Sample(FrameSpec("T", store_timestamp=time)) for time in times])
    found = report_of(spark, log, 1 << 20, Selection(), figures_max=30)
    assert [(row["topic"], row["hour"], row["messages"]) for row in found["hours"]] == [("T", None, 42)]
    assert (found["bins"]["rows"], found["messages"]) == ([], 42)


def test_an_empty_log_is_counted(spark: SparkSession, tmp_path: Path) -> None:
    found = report_of(spark, written_log(tmp_path, []), 1 << 20, Selection())
    assert (found["messages"], found["topics"], found["endOffset"]) == (0, [], 0)
    assert found["index"]["verdict"]["answer"] == "nothing to index"


def stats(log: Log, *words: object) -> CompletedProcess[str]:
    store = log.config.store
    given = ("stats", "--store", store.store, "--data", store.data, "--segment-size", SEGMENT_SIZE)
    return indexd_here(*given, "--hash-slot-num", 300, "--index-num", 800, *words)


@pytest.mark.usefixtures("spark")
def test_the_command_prints_one_object_writes_a_page_speaks_and_selects(log: Log, tmp_path: Path) -> None:
    page = tmp_path / "reports" / "page.html"
    done = stats(log, "--top", "5", "--silence", "30s", "--json", "--report", page)
    assert done.returncode == 0, done.stderr
    check_contents(json.loads(done.stdout), log, 5)
    text = page.read_text(encoding="utf-8")
    assert "<title>Commitlog of" in text
    assert text.count('class="column"') > 20
    said = stats(log, "-t", "OrderPaid", "--quick", "--split-size", "30000").stdout
    found = [words in said for words in ("OrderPaid", "TopicTest", "300 slots are too few")]
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-b", "2", "-e", "1"], 2, "exchange them"),
        (["--top", "0"], 2, "not from 1 to 1000"),
        (["--silence", "soon"], 2, "is not a duration"),
        (["--report", "s3://bucket/x"], 2, "is a URI"),
        (["--report", "{store}/page.html"], 3, "lies inside the store"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(log: Log, words: list[str], code: int, says: str) -> None:
    done = stats(log, *(word.replace("{store}", str(log.config.store.store)) for word in words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert says in done.stderr


@requires_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_a_browser_draws_the_page_runs_nothing_of_the_log_and_fetches_nothing(
    tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "reports" / "stats.html"
    write_page(hostile_report(), Disk(), path, 20)
    page = Page(path, tmp_path / "profile", width=width, dark=dark)
    assert ("data-pwned" in page.dom, page.asked, "clock back" in page.dom) == (False, set(), True)
    assert page.dom.count('class="column"') == 40
    path.write_text('<script src="http://elsewhere.invalid/x.js"></script><p>here', encoding="utf-8")
    assert Page(path, tmp_path / "profile").asked == {"elsewhere.invalid"}, "a request would have been seen"
