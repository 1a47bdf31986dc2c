"""The page in a real browser beside a real daemon, whose log begins where a double cannot count any more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, urlencode, urlsplit

import pytest

from support.browser import CHROMIUM
from support.devtools import Browser, Tab
from support.page import BEGIN, TOPIC, Beside

pytestmark = CHROMIUM

PWN = "document.documentElement.dataset.pwned=1"
HOSTILE = [
    f"<script>{PWN}</script>",
    f'"><img/src=x/onerror={PWN}>',
    f"</pre></td><svg/onload={PWN}>",
    f"javascript:{PWN}",
    "\u202egnp.exe",
    "${title}$$&amp;<!--",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    beside = Beside(tmp_path_factory.mktemp("beside"))
    for number in range(300):
        beside.write(TOPIC, f"order-{number % 100}", TAGS="paid")
    for text in HOSTILE:
        beside.write(text, text, body=text, TAGS=text, **{text: text})
        beside.write(TOPIC, text, body=json.dumps({text: text}), TAGS=text)
    beside.start()
    yield beside
    beside.daemon.kill()
    beside.writer.close()


def asked_elsewhere(tab: Tab, address: str) -> list[str]:
    return [url for url in tab.requests if urlsplit(url).netloc != urlsplit(address).netloc and url != "about:blank"]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_search_open_and_close_with_the_keyboard(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.address)
    tab.wait("document.documentElement.dataset.ready")
    tab.press("/")
    tab.wait("document.activeElement.id === 'q'")
    tab.type("#topic", TOPIC)
    tab.type("#q", "order-7")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('tr.hit').length === 3")
    assert "q=order-7" in str(tab.eval("location.search"))
    shown = tab.eval("[...document.querySelectorAll('tr.hit td:last-child')].map(cell => cell.innerText)")
    assert [number(text) for text in shown] == beside.offsets["order-7"][::-1]
    assert tab.eval("document.querySelectorAll('.timeline .mark').length") == 3
    assert tab.eval("document.querySelectorAll('.strip .mark').length") == 3
    tab.press("j", "j", "k", "ArrowDown", "k")
    middle = str(beside.offsets["order-7"][1])
    assert tab.eval("document.activeElement.closest('tr').dataset.offset") == middle
    assert tab.eval("document.querySelectorAll('.mark.on').length") == 2
    assert tab.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait("document.querySelector('tr.opened article')")
    assert f"Message at {int(middle):,}" in tab.text("tr.opened")
    assert "UNIQ_KEY" in tab.text("tr.opened .properties")
    assert '"amount": 12.50' in tab.text("tr.opened pre")
    assert '"id": 12345678901234567890' in tab.text("tr.opened pre")
    assert tab.text("tr.opened pre").count('"order"') == 2
    tab.click("tr.opened a.view:last-child")
    tab.wait("document.querySelector('tr.opened pre').innerText.startsWith('00000000  7b 22')")
    tab.press("Escape")
    tab.wait("!document.querySelector('tr.opened')")
    assert tab.eval("document.activeElement.closest('tr').dataset.offset") == middle
    assert tab.complaints == []
    assert asked_elsewhere(tab, beside.address) == []


def test_back_leads_to_the_search_before(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.search("order-7"))
    tab.wait("document.documentElement.dataset.ready")
    tab.type("#q", "order-8")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('tr.hit').length && document.title.startsWith('order-8')")
    tab.eval("history.back()")
    tab.wait("document.title.startsWith('order-7') && document.querySelector('#q').value === 'order-7'")


def test_pages_of_a_long_answer(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.search("order-9", max="2"))
    tab.wait("document.documentElement.dataset.ready")
    assert "The newest 2 messages" in tab.text("#answer")
    tab.click("a[rel=next]")
    tab.wait("document.querySelectorAll('tr.hit').length === 1")
    assert number(tab.text("tr.hit td:last-child")) == beside.offsets["order-9"][0]


def test_an_empty_answer_says_why(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.search("never-sent"))
    tab.wait("document.documentElement.dataset.ready")
    assert "Covered and absent" in tab.text("#answer")
    assert f"{BEGIN:,}" in tab.text("#answer .covered")
    tab.open(beside.search("order-7", **{"from": "2001-02-03", "to": "2001-02-03 04:05"}))
    tab.wait("document.documentElement.dataset.ready")
    assert "in this range of time" in tab.text("#answer")
    tab.click("#answer nav a:nth-child(2)")
    tab.wait("document.querySelectorAll('tr.hit').length === 3")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"topic": "", "q": "x"}, "Which topic?"),
        ({"from": "yesterday"}, "'yesterday' is no time"),
        ({"max": "1000000000"}, "a query may ask for"),
        ({"by": "offset", "q": "12"}, "it has expired, the log begins at"),
        ({"by": "id", "q": "xyz"}, "is no offset message id"),
        ({"by": "queue", "q": "7"}, "write them as 0/123"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(
    browser: Browser, beside: Beside, asked: dict[str, str], words: str
) -> None:
    tab = browser.page()
    tab.open(beside.search("order-7", **asked))
    assert words.lower() in tab.text("#answer").lower()


@pytest.mark.parametrize(("by", "q"), [("tags", "paid"), ("unique", f"{7:032X}"), ("time", "-1h"), ("queue", "0/0")])
def test_other_ways_of_searching(browser: Browser, beside: Beside, by: str, q: str) -> None:
    tab = browser.page()
    tab.open(beside.search(q, by=by))
    assert tab.eval("document.querySelectorAll('tr.hit, article.message').length") > 0
    assert tab.complaints == []


def test_the_figures_move_while_messages_are_written(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.address)
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    tab.wait("document.querySelector('#tile-messages .line')?.getAttribute('d')")
    before = number(re.search(r"([\d,]+) messages", tab.text("#state"))[1])  # type: ignore[index]  # it matches
    for _ in range(50):
        beside.write(TOPIC, "while-open")
    beside.caught_up()
    tab.wait(f"document.querySelector('#state').innerText.includes('{before + 50:,} messages')")
    end = beside.writer.max_offset
    tab.wait(f"document.querySelector('#log-size').innerText.includes('{end:,}')")
    assert tab.eval("document.querySelectorAll('#log .part').length") > 0
    tab.wait("document.querySelectorAll('#files .full').length > 0")
    assert "New index" in tab.text("#events")
    tab.wait("Number(document.querySelector('#tile-messages .value').innerText) > 0")
    tab.type("#topic", TOPIC)
    tab.type("#q", "while-open")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('tr.hit').length === 50")
    assert tab.complaints == []


def test_nothing_of_the_log_runs(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    for text in HOSTILE:
        for query in ({"topic": text, "q": text}, {"by": "tags", "topic": text, "q": text}):
            tab.open(f"{beside.address}?{urlencode(query)}")
            tab.wait("document.documentElement.dataset.ready")
            assert tab.eval("document.querySelectorAll('tr.hit').length") == 1
            tab.press("j", "Enter")
            tab.wait("document.querySelector('tr.opened article')")
            seen = text.replace("\u202e", "\\u202e")
            assert seen in tab.text("tr.opened pre")
            assert seen in tab.text("tr.opened .properties")
            if not seen.startswith("\\"):
                assert tab.eval("document.querySelector('#q').value") == text
    for word in (*HOSTILE, "'\"<b>\x00"):
        tab.open(f"{beside.address}?by={quote(word)}&topic={quote(word)}&q={quote(word)}&from={quote(word)}")
    assert not tab.eval("document.documentElement.dataset.pwned")
    assert not tab.eval("document.querySelector('img, #answer script, #answer [onload]')")
    assert not [words for words in tab.complaints if "status of 422" not in words]
    assert asked_elsewhere(tab, beside.address) == []


def test_without_javascript_searching_works(browser: Browser, beside: Beside) -> None:
    tab = browser.page(script=False)
    tab.open(beside.address)
    assert "needs JavaScript" in tab.html()
    tab.click("#topic")
    tab.call("Input.insertText", text=TOPIC)
    tab.click("#q")
    tab.call("Input.insertText", text="order-7")
    tab.navigate(lambda: tab.press("Enter"))
    html = tab.html()
    assert html.count('class="hit"') == 3
    assert "data-ready" not in html
    tab.navigate(lambda: tab.click("tr.hit a.open"))
    html = tab.html()
    assert f"{beside.offsets['order-7'][-1]:,}" in html
    assert "UNIQ_KEY" in html
    tab.navigate(lambda: tab.click("a.view:last-child"))
    assert "00000000" in tab.html()
    assert all("/api/" not in url and not url.endswith(".js") for url in tab.requests)


def test_the_policy_and_how_long_files_are_kept(browser: Browser, beside: Beside) -> None:
    tab = browser.page()
    tab.open(beside.address)
    headers = tab.eval("fetch('/').then(found => Object.fromEntries(found.headers))")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["cache-control"] == "no-store"
    style = "document.querySelector('link[rel=stylesheet]').href"
    assert "immutable" in tab.eval(f"fetch({style}).then(found => found.headers.get('cache-control'))")
    old = "fetch('/static/older/page.css').then(found => found.headers.get('cache-control'))"
    assert tab.eval(old) == "no-cache"
    assert tab.eval("fetch('/static/older/..%2fpage.html').then(found => found.status)") == 404
