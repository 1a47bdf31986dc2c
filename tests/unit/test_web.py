"""The page's parts without a browser: what is escaped, what times mean, how bodies and drawings come out."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import UsageError
from indexd.findings import findings_of
from indexd.flush.frontier import Uncovered
from indexd.pages.markup import element
from indexd.query import TIME_MAX, Coverage, Hit
from indexd.query.message import Body
from indexd.serve.board import KINDS
from indexd.serve.status import summary_of
from indexd.serve.web.answer import body_view, log_strip, timeline
from indexd.serve.web.page import ASSETS, asset, render, render_page
from indexd.serve.web.search_form import TIME_MIN, WAYS, SearchForm

NOW = 1_700_000_000_123


class Read(HTMLParser):
    """The elements with their attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(str(html))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t")))
def test_text_stays_text_wherever_it_stands(text: str) -> None:
    read = Read(element("p", text, title=text))
    assert read.elements == [("p", {"title": text})]
    assert read.text == text


def test_what_a_terminal_obeys_is_written_as_an_escape_in_html() -> None:
    assert element("p", "a\x1b[2J\x9b\r\n\t", title="\x1b\x9b\x7f") == (
        '<p title="&#27;\\x9b&#127;">a\\x1b[2J\\x9b\\r\n\t</p>'
    )
    page = render_page(SearchForm(topic="T", q="\x1b]0;pwned\x07"), None, None)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


@pytest.mark.parametrize(
    ("text", "zone", "wanted"),
    [
        ("2023-11-14 22:13:20", "", 1_700_000_000_000),
        ("2023-11-14T22:13:20.5Z", "+08:00", 1_700_000_000_500),
        ("2023-11-15 06:13:20", "+08:00", 1_700_000_000_000),
        ("2023-11-14", "", 1_699_920_000_000),
        ("22:13", "", 1_700_000_000_000 - 20_000),
        ("22:14", "", 1_700_000_000_000 - 20_000 + 60_000 - 86_400_000),
        ("06:13", "+08:00", 1_700_000_000_000 - 20_000),
        ("-15m", "", NOW - 900_000),
        ("-7d", "", NOW - 7 * 86_400_000),
        ("now", "", NOW),
        ("1700000000000", "", 1_700_000_000_000),
        ("1970-01-01", "", 0),
    ],
)
def test_times_as_people_write_them(text: str, zone: str, wanted: int) -> None:
    assert SearchForm(zone=zone).moment(text, NOW) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "yesterday",
        "-1",
        "1969-12-31",
        "0001-01-01",
        "-1y",
        "25:00",
        "2023-13-01",
        "9" * 19,
        "-99999999d ago",
        "٣",
        "24:00:00:00",
    ],
)
def test_what_is_no_time_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        SearchForm(begin=text).times(NOW)
    assert "-15m" in str(raised.value.hint)


def test_a_range() -> None:
    assert SearchForm().times(NOW) == (TIME_MIN, TIME_MAX)
    assert SearchForm(begin="-1h", end="now").times(NOW) == (NOW - 3_600_000, NOW)
    with pytest.raises(UsageError, match="ends before it begins"):
        SearchForm(begin="now", end="-1h").times(NOW)


@given(st.fixed_dictionaries(dict.fromkeys(("by", "topic", "q", "from", "to", "max", "mode", "before"), st.text())))
def test_an_address_leads_back_to_what_was_asked(parameters: dict[str, str]) -> None:
    asked = SearchForm.of(parameters)
    again = SearchForm.of(dict(_pairs(asked.link())))
    assert again == SearchForm.of(dict(_pairs(again.link())))
    if all(text.isascii() for text in parameters.values()):
        assert again == asked


def _pairs(link: str) -> list[tuple[str, str]]:
    return parse_qsl(link[1:], keep_blank_values=True)


def _body(form: SearchForm, body: Body) -> str:
    return render("body.html", body=body_view(form, body, 1 << 20))


def test_every_event_has_words_on_the_page() -> None:
    script = asset("panels.js").decode()
    assert set(re.findall(r"^  (\w+): \[\"(?:|good|bad)\", ", script, re.MULTILINE)) == KINDS.keys()


def test_json_keeps_what_a_parser_would_lose() -> None:
    text = '{"a": 1.10, "a": 12345678901234567890123, "b": [], "c": {}, "d": [1, [2]], "e": 1e400}'
    shown = Read(_body(SearchForm(), Body(text.encode(), None, is_unpacked=False))).text
    assert '"a": 1.10,\n  "a": 12345678901234567890123,\n  "b": [],\n  "c": {},\n  "d": [\n    1,' in shown
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "[[[[" in Read(_body(SearchForm(), Body(deep, None, is_unpacked=False))).text


@given(st.binary(max_size=300), st.sampled_from(["", "text", "json", "hex"]))
def test_no_body_breaks_out(data: bytes, view: str) -> None:
    html = _body(SearchForm(view=view), Body(data, None, is_unpacked=False))
    names = {name for name, _ in Read(html).elements}
    assert names <= {"div", "h3", "span", "nav", "a", "pre", "p"}


def test_hex_in_pages() -> None:
    data = bytes(range(256)) * 100
    first = Read(_body(SearchForm(by="offset", q="1", view="hex"), Body(data, None, is_unpacked=False)))
    assert "00000010  10 11 12 13 14 15 16 17  18 19" in first.text
    link = next(found["href"] or "" for name, found in first.elements if "at=" in (found.get("href") or ""))
    again = SearchForm.of(dict(_pairs(link)))
    second = Read(_body(again, Body(data, None, is_unpacked=False)))
    assert "00002000  00 01" in second.text
    assert "bytes 8,192 to 16,384 of 25,600" in second.text


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=30),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.integers(0, 2**63 - 1), min_size=5, max_size=5),
)
def test_drawings_stay_inside(places: list[tuple[int, int]], times: tuple[int, int], ends: list[int]) -> None:
    hits = [Hit(offset, time) for offset, time in places]
    begin, low, high, end = sorted(ends[:4])
    coverage = Coverage(begin, end, ends[4], uncovered=(Uncovered(low, high, "expired"),))
    time, log = timeline(hits, min(times), max(times)), log_strip(coverage, hits)
    assert len(time["marks"]) == len(log["marks"]) == len(hits)
    assert log_strip(coverage, ())["parts"] == log["parts"]
    for drawn in (*time["bars"], *time["marks"], *log["parts"], *log["marks"]):
        assert -0.001 <= float(drawn["x"].removesuffix("%")) <= 100.001


def test_the_page_names_only_files_that_there_are() -> None:
    for by in WAYS:
        read = Read(render_page(SearchForm(by=by, q='"><x>'), None, None))
        links = [found.get("href") or found.get("src") or "" for _, found in read.elements]
        named = {link.rpartition("/")[2] for link in links if link.startswith("/static/")}
        assert named == {"icon.svg", "page.css", "theme.js", "page.js"}
        assert not [
            found for _, found in read.elements if "style" in found or any(key.startswith("on") for key in found)
        ]
        assert "x" not in {name for name, _ in read.elements}
    for name in ASSETS:
        text = asset(name).decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert set(re.findall(r'from "\./([\w.]+)"', text)) <= set(ASSETS)
        assert not re.search(r"innerHTML\s*=[^=]|insertAdjacentHTML|document\.write|eval\(", text)


ROW = {
    "cluster": "c", "nodeId": "n", "store": "/s", "data": "/d", "flavour": "auto", "mode": "shadow",
    "phase": "running", "messages": 3,
}  # fmt: skip


def page_of(**figures: Any) -> str:
    row = ROW | figures
    return render_page(SearchForm(), None, row | {"summary": summary_of(row), "findings": findings_of(row)})


def test_a_broker_that_is_down_is_a_problem_in_mode_offload_alone() -> None:
    broker = {"alive": False, "why": "its lock is free", "unsafe": []}
    for mode, expected in (("shadow", []), ("offload", ["the broker is not running: its lock is free"])):
        assert findings_of(ROW | {"mode": mode, "broker": broker}) == expected
        assert ("the broker is not running" in page_of(mode=mode, broker=broker)) is bool(expected)
    assert findings_of(ROW | {"broker": {"alive": False, "unsafe": ["it indexes"]}}) == ["it indexes"]


def test_a_daemon_that_stands_at_damage_is_not_up_to_date() -> None:
    page = page_of(corrupt={"offset": 41_380, "reason": "no magic"}, dispatchBehindMilliseconds=0)
    assert "Standing at bytes that are no frame" in page
    assert "Up to date: 3 messages" in page_of()
    assert "Catching up: 1 KiB, 12 s behind" in page_of(dispatchBehindBytes=1024, dispatchBehindMilliseconds=12_000)


def without_script(html: str) -> str:
    return Read(html[html.index("<noscript>") : html.index("</noscript>")]).text


def test_without_javascript_it_says_what_it_cannot_do() -> None:
    asked = SearchForm(topic="T", q="k")
    assert "searching does not" in without_script(
        render_page(asked, None, ROW | {"summary": summary_of(ROW), "findings": []}, "http://h:1")
    )
    refused = without_script(render_page(asked, None, None, "https://broker-7:9577"))
    assert "This server wants a token" in refused
    assert "searching does not" not in refused
    curl = """curl -H "Authorization: Bearer $(cat TOKEN_FILE)" 'https://broker-7:9577/api/v1/"""
    assert f"{curl}status'\n" in refused
    assert f"{curl}messages/by-key?topic=TOPIC&key=KEY'\n" in refused
    # What a browser says is the server's name does not get into a line that is to be pasted.
    hostile = without_script(render_page(asked, None, None, "http://x'; rm -rf ~ #"))
    assert "rm -rf" not in hostile
    assert "'http://HOST:PORT/api/v1/status'" in hostile
