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
from indexd.query.message import Body
from indexd.query.questions import ByKey
from indexd.serve.daemon_status import summary_of
from indexd.serve.events import KINDS
from indexd.serve.web.page import ASSETS, WAYS, SearchForm, asset, body_view, render, render_page

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


def test_what_a_terminal_obeys_is_written_as_an_escape_in_html() -> None:
    page = render_page(SearchForm(topic="T", q="\x1b]0;pwned\x07"), None, None)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


@pytest.mark.parametrize(
    ("text", "zone", "wanted"),
    [
        ("2023-11-14 22:13:20", "", 1_700_000_000_000),
        ("2023-11-14T22:13:20.5Z", "+08:00", 1_700_000_000_500),
        ("2023-11-15 06:13:20", "+08:00", 1_700_000_000_000),
        ("2023-11-14", "", 1_699_920_000_000),
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
    ["yesterday", "-1", "1969-12-31", "-1y", "25:00", "03:15", "2023-13-01", "9" * 19, "9" * 5000, "-99999999d", "٣"],
)
def test_what_is_no_time_says_what_to_do(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        SearchForm(topic="T", q="k", begin=text).question()
    assert raised.value.hint in ("correct it", "write 2026-11-22 03:15, -15m, -1h, -7d, or milliseconds since 1970")


def test_a_range() -> None:
    asked = SearchForm(topic="T", q="k", begin="-1h", end="now").question()
    assert isinstance(asked, ByKey)
    assert 0 <= asked.end - (asked.begin or 0) - 3_600_000 < 1000
    with pytest.raises(UsageError, match="is behind the last one"):
        SearchForm(topic="T", q="k", begin="now", end="-1h").question()


@given(st.fixed_dictionaries(dict.fromkeys(("by", "topic", "from", "mode"), st.text())))
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


def _shown(data: bytes, view: str = "") -> str:
    return Read(_body(SearchForm(view=view), Body(data, None, is_unpacked=False))).text


def test_json_that_would_lose_by_being_indented_stays_as_it_is() -> None:
    assert '{\n  "a": 1.5,\n  "b": [],\n  "c": [\n    12345678901234567890123\n' in _shown(
        b'{"a":1.5, "b":[], "c":[12345678901234567890123]}'
    )
    for text in ('{"a": 1.10}', '{"a": 1, "a": 2}', '{"e": 1e400}', '{"e": "\\ud800"}', "[" * 100_000 + "]" * 100_000):
        assert text in _shown(text.encode(), "json")


@given(st.binary(max_size=300), st.sampled_from(["", "text", "json", "hex"]))
def test_no_body_breaks_out(data: bytes, view: str) -> None:
    html = _body(SearchForm(view=view), Body(data, None, is_unpacked=False))
    names = {name for name, _ in Read(html).elements}
    assert names <= {"div", "h3", "span", "nav", "a", "pre", "p"}


def test_hex_is_shown_up_to_a_bound() -> None:
    shown = _shown(bytes(range(256)) * 100, "hex")
    assert "00000010  10 11 12 13 14 15 16 17  18 19" in shown
    assert "00001ff0  f0" in shown
    assert "00002000" not in shown
    assert "The first 8 KiB of 25 KiB; the API has all of it." in shown


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
    for mode, is_problem in (("shadow", False), ("offload", True)):
        assert ("the broker is not running: its lock is free" in page_of(mode=mode, broker=broker)) is is_problem


def test_a_daemon_that_stands_at_damage_is_not_up_to_date() -> None:
    page = page_of(corrupt={"offset": 41_380, "reason": "no magic"}, dispatchBehindMilliseconds=0)
    assert "Standing at bytes that are no frame" in page
    assert "Up to date: 3 messages" in page_of()
    assert "Catching up: 1 KiB, 12 s behind" in page_of(dispatchBehindBytes=1024, dispatchBehindMilliseconds=12_000)


def test_without_javascript_it_says_what_it_cannot_do() -> None:
    assert "searching does not" in page_of()
    refused = Read(render_page(SearchForm(topic="T", q="k"), None, None)).text
    assert "This server wants a token" in refused
    assert "searching does not" not in refused
    assert """curl -H "Authorization: Bearer $(cat TOKEN_FILE)" 'http://HOST:PORT/api/v1/status'\n""" in refused
