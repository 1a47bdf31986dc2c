"""The statistics' page in a real browser, and its words without one; names out of the log are hostile."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.writer import FrameSpec
from indexd.spark.stats.collect import collect
from indexd.spark.stats.content import Selection
from indexd.spark.stats.page import render_page, write_page
from indexd.spark.stats.report import to_report
from indexd.storage.disk import Disk
from support.browser import Page, requires_chromium
from support.stats import BASE_TIME, plain_run, written_log
from support.strategies import Sample

PWN = "document.documentElement.dataset.pwned=1"
HOSTILE = [
    f"<script>{PWN}</script>",
    f'"><img/src=x/onerror={PWN}>',
    f"</script><script>{PWN}</script>",
    f"<svg/onload={PWN}>",
    f"<a/href=javascript:{PWN}>click</a>",
    "{{7*7}}{%print(1)%}",
    "--bad",
    "<b>bold</b>&lt;&amp;",
    "\u202egnp.exe",
    "<!--",
    "]]>",
]


def report_of(folder: Path, samples: list[Sample], **selected: Any) -> dict[str, Any]:
    log = written_log(folder, samples, hash_slot_num=50, index_num=200)
    return to_report(collect(plain_run, Disk(), log.config, Selection(**selected), split_size=20_000, top=20))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    samples = [
        Sample(
            FrameSpec(
                HOSTILE[number % len(HOSTILE)],
                body=b"b" * (number % 50),
                properties={
                    "KEYS": f"{HOSTILE[number % 7]} {HOSTILE[number % 5]}",
                    "TAGS": HOSTILE[(number + 1) % len(HOSTILE)],
                    "UNIQ_KEY": HOSTILE[(number + 2) % len(HOSTILE)],
                },
                store_timestamp=BASE_TIME + 700_000 * number - (2_000_000 if number > 60 else 0),
            )
        )
        for number in range(120)
    ]
    return report_of(tmp_path_factory.mktemp("hostile"), samples)


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


def test_what_the_log_says_stays_text(hostile: dict[str, Any]) -> None:
    elements = Elements(render_page(hostile, 20))
    names = {name for name, _ in elements.found}
    assert not names & {"img", "a", "iframe", "link", "object", "form", "input"}
    assert "script" not in names
    assert [name for name, _ in elements.found].count("svg") == 3, "the page's own"
    assert not [
        name for _, attributes in elements.found for name in attributes if name.startswith("on") or name == "src"
    ]
    words = " ".join(elements.words)
    for name in HOSTILE[:8]:
        assert name in words
    assert "\\u202egnp.exe" in words


def test_the_page_allows_no_address_and_no_foreign_script(hostile: dict[str, Any]) -> None:
    elements = Elements(render_page(hostile, 20))
    policy = next(a["content"] for name, a in elements.found if a.get("http-equiv") == "Content-Security-Policy") or ""
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "script-src" not in rules
    assert "http" not in policy


@requires_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_a_browser_draws_it_runs_nothing_of_the_log_and_fetches_nothing(
    hostile: dict[str, Any], tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "reports" / "stats.html"
    write_page(hostile, Disk(), path, 20)
    page = Page(path, tmp_path / "profile", width=width, dark=dark)
    assert "data-pwned" not in page.dom
    assert page.asked == set()
    drawn = page.dom.split('<figure class="plot">')[1:]
    assert len(drawn) == 3
    for plot in drawn:
        assert plot.partition("</figure>")[0].count('class="column"') > 1
    assert "clock back" in page.dom


def test_eight_minutes_are_told_apart_by_seconds(tmp_path: Path) -> None:
    samples = [
        Sample(FrameSpec("T", properties={"KEYS": "k"}, store_timestamp=BASE_TIME + 1000 * at)) for at in range(480)
    ]
    report = report_of(tmp_path, samples)
    assert report["bins"]["stepMs"] == 5000
    assert [row["messages"] for row in report["bins"]["rows"]][1:-1] == [5] * (len(report["bins"]["rows"]) - 2)
    assert sum(row["messages"] for row in report["bins"]["rows"]) == 480
    page = render_page(report, 20)
    assert "messages in 5 s" in page
    assert page.count('class="column"') >= 96


def test_the_page_is_small_and_its_font_is_one(tmp_path: Path) -> None:
    samples = [
        Sample(
            FrameSpec(
                f"Topic{number % 30}", body=b"x" * (number % 900), properties={"KEYS": f"k{number}"},
                store_timestamp=BASE_TIME + 3_600_000 * number,
            )
        )
        for number in range(2400)
    ]  # fmt: skip
    page = render_page(report_of(tmp_path, samples), 1000)
    assert len(page.encode()) < 500_000
    assert "font-family" not in page


@requires_chromium
def test_a_request_would_have_been_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<script src="http://elsewhere.invalid/x.js"></script><p>here', encoding="utf-8")
    assert Page(path, tmp_path / "profile").asked == {"elsewhere.invalid"}


def test_a_page_of_an_empty_log(tmp_path: Path) -> None:
    page = render_page(report_of(tmp_path, []), 20)
    assert "There is no message" in page


def test_a_page_of_messages_without_keys(tmp_path: Path) -> None:
    page = render_page(report_of(tmp_path, [Sample(FrameSpec("T", store_timestamp=BASE_TIME))] * 3), 20)
    assert "No message has KEYS" in page
    assert "there is no chain at all" in page


def test_a_page_of_times_that_no_calendar_has(tmp_path: Path) -> None:
    samples = [Sample(FrameSpec("T", properties={"KEYS": "k"}, store_timestamp=time)) for time in (-(2**62), 0, 2**62)]
    page = render_page(report_of(tmp_path, samples), 20)
    assert "Messages by topic" in page


def test_a_selection_is_said(tmp_path: Path) -> None:
    samples = [Sample(FrameSpec(topic, store_timestamp=BASE_TIME)) for topic in ("T", "Other")]
    page = render_page(report_of(tmp_path, samples, topics=("T",), begin=BASE_TIME), 20)
    assert "Only what was asked for" in page
    assert "Other" not in "".join(Elements(page).words)
