"""The page in a real browser beside a real daemon that comes and goes; its log begins where a double cannot count."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
import structlog

from indexd.config import load
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.server import ServeThread
from support.browser import CHROMIUM, TOPIC, Beside, Browser, Tab

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
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    with Beside(tmp_path_factory.mktemp("beside")) as beside:
        for number in range(300):
            beside.write(TOPIC, f"order-{number % 100}", TAGS="paid")
        for text in HOSTILE:
            beside.write(text, text, body=text, TAGS=text, **{text: text})
            beside.write(TOPIC, text, body=json.dumps({text: text}), TAGS=text)
        beside.start()
        yield beside


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Beside]:
    """With one message, to be stopped or crowded."""
    with Beside(tmp_path) as one:
        one.write(TOPIC, "order-1")
        one.start()
        yield one


def search(tab: Tab, q: str, **more: str) -> None:
    """By the form that is open."""
    for field, text in {"topic": TOPIC, "q": q, **more}.items():
        tab.type(f"#{field}", text)
    tab.press("Enter")


def asked_elsewhere(tab: Tab, address: str) -> list[str]:
    return [url for url in tab.requests if urlsplit(url).netloc != urlsplit(address).netloc and url != "about:blank"]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_search_open_and_close_with_the_keyboard(browser: Browser, beside: Beside) -> None:
    tab = browser.page(beside.address)
    tab.wait("document.documentElement.dataset.ready")
    tab.press("/")
    tab.wait("document.activeElement.id === 'q'")
    search(tab, "order-7")
    tab.wait("document.querySelectorAll('tr.hit').length === 3")
    assert "q=order-7" in str(tab.eval("location.search"))
    shown = tab.eval("[...document.querySelectorAll('tr.hit td:last-child')].map(cell => cell.innerText)")
    assert [number(text) for text in shown] == beside.offsets["order-7"][::-1]
    tab.press("j", "j", "k", "ArrowDown", "k")
    middle = str(beside.offsets["order-7"][1])
    assert tab.eval("document.activeElement.closest('tr').dataset.offset") == middle
    assert tab.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait("document.querySelector('tr.opened article')")
    opened = tab.text("tr.opened")
    said = (f"Message at {int(middle):,}", "UNIQ_KEY", '"amount": 12.50', '"id": 12345678901234567890')
    assert [words for words in said if words not in opened] == []
    assert tab.text("tr.opened pre").count('"order"') == 2
    tab.click("tr.opened a.view:last-child")
    tab.wait("document.querySelector('tr.opened pre').innerText.startsWith('00000000  7b 22')")
    tab.press("Escape")
    tab.wait("!document.querySelector('tr.opened')")
    assert tab.eval("document.activeElement.closest('tr').dataset.offset") == middle
    search(tab, "order-8")
    tab.wait("document.title.startsWith('order-8')")
    tab.eval("history.back()")
    tab.wait("document.title.startsWith('order-7') && document.querySelector('#q').value === 'order-7'")
    assert tab.complaints == asked_elsewhere(tab, beside.address) == []


def test_the_figures_move_while_messages_are_written(browser: Browser, beside: Beside) -> None:
    tab = browser.page(beside.address)
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    tab.wait("document.querySelector('#tile-messages .line')?.getAttribute('d')")
    for _ in range(50):
        beside.write(TOPIC, "while-open")
    beside.caught_up()
    tab.wait(f"document.querySelector('#state').innerText.includes('{beside.daemon.state()['messages']:,} messages')")
    tab.wait(f"document.querySelector('#log-size').innerText.includes('{beside.writer.max_offset:,}')")
    assert tab.eval("document.querySelectorAll('#log .part').length") > 0
    tab.wait("document.querySelectorAll('#files .full').length > 0")
    assert "New index" in tab.text("#events")
    tab.wait("Number(document.querySelector('#tile-messages .value').innerText) > 0")
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
    for word in (*HOSTILE, "'\"<b>\x00"):
        tab.open(f"{beside.address}?by={quote(word)}&topic={quote(word)}&q={quote(word)}&from={quote(word)}")
    assert not tab.eval("document.documentElement.dataset.pwned")
    assert not tab.eval("document.querySelector('img, #answer script, #answer [onload]')")
    assert not [words for words in tab.complaints if "status of 422" not in words]
    assert asked_elsewhere(tab, beside.address) == []


def test_without_javascript_searching_works(browser: Browser, beside: Beside) -> None:
    tab = browser.page(beside.address, script=False)
    assert "needs JavaScript" in tab.html()
    for field, text in (("#topic", TOPIC), ("#q", "order-7")):
        tab.click(field)
        tab.call("Input.insertText", text=text)
    tab.navigate(lambda: tab.press("Enter"))
    assert tab.html().count('class="hit"') == 3
    tab.navigate(lambda: tab.click("tr.hit a.open"))
    assert f"{beside.offsets['order-7'][-1]:,}" in tab.html()
    tab.navigate(lambda: tab.click("a.view:last-child"))
    assert "00000000" in tab.html()
    assert all("/api/" not in url and not url.endswith(".js") for url in tab.requests)


TOKEN = "0123456789abcdef"
STREAMS = 32
ROW = {
    "writtenAt": 1_700_000_000_000,
    "beginOffset": 2**53 + 1,
    "phyOffset": 2**53 + 3000,
    "durableOffset": 2**53 + 2001,
    "readOffset": 2**53 + 3500,
    "commitLogMinOffset": 2**53 + 501,
    "commitLogMaxOffset": 2**53 + 4003,
    "caughtUp": False,
    "dispatchBehindBytes": 1003,
    "dispatchBehindMilliseconds": 90_000,
    "messages": 12,
    "indexEntries": 40,
    "indexFiles": 1,
    "corruptBytes": 0,
    "uncovered": [[2**53 + 1001, 2**53 + 1101, "<b>expired</b>"]],
    "corrupt": {"offset": 2**53 + 3001, "reason": "<i>no magic</i>"},
    "problems": {"build": "cannot write <img src=x>: No space left on device"},
}


def test_a_daemon_that_hangs_or_is_started_again(browser: Browser, one: Beside) -> None:
    address = one.address
    tab = browser.page(address)
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    os.kill(one.daemon.pid, signal.SIGSTOP)
    tab.wait("document.querySelector('#link').dataset.link === 'stale'")
    os.kill(one.daemon.pid, signal.SIGCONT)
    tab.wait("document.querySelector('#link').dataset.link !== 'stale'")
    assert one.daemon.terminate() == 0
    tab.wait("document.querySelector('#link').innerText.startsWith('stale: no answer for')")
    assert tab.eval("document.body.classList.contains('is-stale')")
    search(tab, "order-1")
    tab.wait("document.querySelector('#answer').innerText.includes('The daemon does not answer')")
    assert "systemctl status" in tab.text("#answer")
    one.write(TOPIC, "order-1")
    one.start(urlsplit(address).netloc)
    tab.wait("!document.body.classList.contains('is-stale')")
    tab.eval("document.querySelector('#search').requestSubmit()")
    tab.wait("document.querySelectorAll('tr.hit').length === 2")


def test_where_no_stream_is_to_be_had_it_asks_again_and_again(browser: Browser, one: Beside) -> None:
    place = urlsplit(one.address)
    with ExitStack() as stack:
        for _ in range(STREAMS):
            stream = stack.enter_context(socket.create_connection((str(place.hostname), int(place.port or 0))))
            stream.sendall(f"GET /api/v1/live HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            assert stream.recv(1000).startswith(b"HTTP/1.1 200")
        tab = browser.page(one.address)
        tab.wait("document.querySelector('#link').dataset.link === 'polling'")
        one.write(TOPIC, "order-2")
        tab.wait("document.querySelector('#state').innerText.includes('2 messages')")
    tab.wait("document.querySelector('#link').dataset.link === 'live'")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Beside]:
    (tmp_path / "token").write_text(TOKEN)
    with Beside(tmp_path, INDEXD_HTTP_TOKEN_FILE=str(tmp_path / "token")) as guarded:
        guarded.write(TOPIC, "order-7")
        guarded.start()
        yield guarded


def test_a_token_is_asked_for_and_stays_in_the_tab(browser: Browser, guarded: Beside) -> None:
    tab = browser.page(guarded.search("order-7"))
    tab.wait("document.querySelector('#token').hidden === false")
    assert not tab.eval("document.querySelectorAll('tr.hit').length")
    assert str(guarded.daemon.store) not in tab.text()
    tab.type("#secret", "not the token")
    tab.press("Enter")
    tab.wait("document.querySelector('#token').hidden === false && document.querySelector('#secret').value === ''")
    tab.type("#secret", TOKEN)
    tab.press("Enter")
    tab.wait("document.querySelectorAll('tr.hit').length === 1")
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    assert tab.eval("document.querySelector('#token').hidden")
    assert str(guarded.daemon.store) in tab.text("header")
    assert tab.eval("sessionStorage.getItem('token')") == TOKEN
    assert TOKEN not in str(tab.eval("location.href + JSON.stringify(localStorage) + document.cookie"))
    assert not [url for url in tab.requests if TOKEN in url]


def test_theme_and_zone_are_kept(browser: Browser, one: Beside) -> None:
    tab = browser.page(dark=True)
    tab.call("Emulation.setTimezoneOverride", timezoneId="Asia/Shanghai")
    tab.open(one.search("order-1"))
    tab.wait("document.documentElement.dataset.ready")
    assert tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)"
    utc = tab.text("tr.hit time")
    tab.click("#theme")
    tab.click("#zone")
    assert tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert (int(tab.text("tr.hit time")[11:13]) - int(utc[11:13])) % 24 == 8
    tab.open(one.address)
    tab.wait("document.documentElement.dataset.ready")
    assert tab.eval("document.documentElement.dataset.theme") == "light"
    search(tab, "order-1", **{"from": "2001-02-03"})
    tab.wait("location.search.includes('zone=%2B08%3A00')")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[DaemonStatus]:
    """What is shown without a daemon behind it; ``board.http`` is where."""
    config = load({"store": str(tmp_path), "data": str(tmp_path / "data"), "http": "127.0.0.1:0"}, None, {})
    board = DaemonStatus(config)
    with ServeThread(config, board, structlog.get_logger()):
        while board.http is None:
            time.sleep(0.01)
        yield board


def test_a_recovery_is_drawn_and_searching_waits_for_it(browser: Browser, board: DaemonStatus) -> None:
    board.recovering("replay", 3, 10)
    tab = browser.page(f"http://{board.http}/")
    tab.wait("document.querySelector('#recovery').innerText.includes('3 of 10')")
    assert "Recovering, replay: 30 %" in tab.text("#state")
    assert tab.eval("document.querySelector('[role=progressbar]').getAttribute('aria-valuenow')") == "30"
    search(tab, "order-1")
    tab.wait("document.querySelector('#answer').innerText.includes('The index is recovering')")
    assert "Search again in a moment" in tab.text("#answer")
    board.recovering("replay", 9, 10)
    tab.wait("document.querySelector('#recovery').innerText.includes('9 of 10')")
    board.running(lambda: dict(ROW))
    tab.wait("document.querySelector('#recovery').hidden")


def test_events_are_said_in_words_and_what_is_well_again_is_green(browser: Browser, board: DaemonStatus) -> None:
    board.events.tell("degraded", {"stage": "build", "problem": "cannot write <b>x</b>", "retry_seconds": 1})
    board.events.tell("healed", {"stage": "build"})
    board.events.tell("rolled", {"files": 1, "phy_offset": 2**53 + 1})
    board.running(lambda: dict(ROW))
    tab = browser.page(f"http://{board.http}/")
    tab.wait("document.querySelectorAll('#events li').length === 3")
    said = ("build: cannot write <b>x</b>", "build goes on", "1 file, at offset 9,007,199,254,740,993")
    assert [words for words in said if words not in tab.text("#events")] == []
    kinds = "[...document.querySelectorAll('#events .kind')]"
    assert tab.eval(f"{kinds}.map((one) => one.innerText)") == ["Index file full", "Healed", "Waiting"]
    good = "Object.assign(document.body.appendChild(document.createElement('p')), {className: 'verdict good'})"
    colours = tab.eval(f"[...{kinds}, {good}].map((one) => getComputedStyle(one).color)")
    assert [colour == colours[-1] for colour in colours[:-1]] == [False, True, False]


def test_topics_are_completed_as_they_are_typed(browser: Browser, one: Beside) -> None:
    for topic in ("OrderCreated", "Stock"):
        one.write(topic, "k")
    one.caught_up()
    tab = browser.page(one.address)
    tab.type("#topic", "orde")
    tab.wait("document.querySelectorAll('#topics option').length === 2")
    found = tab.eval("[...document.querySelectorAll('#topics option')].map((one) => one.value)")
    assert found == ["OrderCreated", "OrderPaid"]


def test_what_is_wrong_stands_at_the_top_and_the_log_shows_where(browser: Browser, board: DaemonStatus) -> None:
    board.running(lambda: ROW | {"mode": "offload"})
    board.broker = {"alive": False, "why": "<b>no lock</b>", "unsafe": ["<u>it indexes itself</u>"]}
    for script in (False, True):
        tab = browser.page(f"http://{board.http}/", script=script)
        if script:
            tab.wait("document.querySelector('#log .part')")
        html = tab.html()
        said = ("No space left", "&lt;i&gt;no magic", "100 bytes", "&lt;b&gt;no lock", "&lt;u&gt;it indexes itself")
        assert [words for words in said if words not in html] == []
        assert "<img" not in html
    kinds: Any = tab.eval("[...document.querySelectorAll('#log .part')].map(part => part.classList[1])")
    assert kinds == ["expired", "durable", "indexed", "waiting", "hole"]
    assert "Indexing waits (build)" in tab.text("#state")
    legend, offsets = tab.text("#log"), (2**53 + 501, 2**53 + 2001, 2**53 + 4003, 2**53 + 1101)
    assert [offset for offset in offsets if f"{offset:,}" not in legend] == []
    for tile in ("lag", "broker"):
        assert tab.eval(f"document.querySelector('#tile-{tile}').className") == "tile bad"
    board.running(lambda: ROW | {"mode": "shadow"})  # where it is a figure
    tab.wait("document.querySelector('#tile-broker').className === 'tile'")
    assert [words for words in tab.complaints if "status of 503" not in words] == []
